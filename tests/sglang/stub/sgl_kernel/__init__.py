"""Stands for SGLang's kernels, of which only builds for CUDA exist; none is called on a CPU."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no build for CPUs")

    return missing
