// A build of torch for the CPU has no device guard for CUDA, and makes no tensor that says it is there without one.
// torch's own guard that does nothing is all that the simulated card needs.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
}  // namespace
