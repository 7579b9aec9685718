"""The readers of adapters (LoRA): PEFT's folders and GGUF files become what is added to a model's matrices."""
