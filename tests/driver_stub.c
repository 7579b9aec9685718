/* CUDA's driver as Triton and our launcher call it, on a machine without a card: it runs nothing, and keeps what the last
   launch was given. `sizes`: of the parameters of the kernel that is launched next, as its PTX has them. */
#include "cuda.h"
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT unsigned int sizes[64];
EXPORT unsigned int num_sizes;
EXPORT unsigned char taken[1024]; /* the grid, the block, shared bytes, attributes; the parameters, each in 8 bytes */
EXPORT int fails_with, has_context = 1, num_retained;

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "another error";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 101376 : 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = has_context ? (CUcontext)1 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)1;
  ++num_retained;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { has_context = context != 0; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image;
  return memcmp(image, "\177ELF", 4) ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strlen(name);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 8 * (int)attribute;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  taken[1000] = (unsigned char)attribute;
  memcpy(taken + 1004, &value, 4);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer + 16; /* the host's memory, which a card may see elsewhere */
  return attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (!has_context)
    return CUDA_ERROR_INVALID_CONTEXT;
  if (fails_with)
    return (CUresult)fails_with;
  memset(taken, 0, 1000);
  memcpy(taken, config, 7 * sizeof(unsigned int));
  memcpy(taken + 32, &config->hStream, 8);
  memcpy(taken + 40, &function, 8);
  for (unsigned int i = 0; i < config->numAttrs; ++i) {
    taken[48 + 2 * i] = (unsigned char)config->attrs[i].id;
    taken[49 + 2 * i] = (unsigned char)config->attrs[i].value.programmaticStreamSerializationAllowed;
  }
  for (unsigned int i = 0; i < num_sizes; ++i)
    memcpy(taken + 64 + 8 * i, parameters[i], sizes[i]);
  return CUDA_SUCCESS;
}
