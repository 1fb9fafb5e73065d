"""vLLM's entry points into the overlay, and nothing else. Both may be called more than once per process."""


def platform() -> str | None:
    """Entry point `vllm.platform_plugins`: qualified name of the platform class, or None to step aside."""
    from vllm_sfa_cp.platforms import choose

    return choose().qualname


def register() -> None:
    """Entry point `vllm.general_plugins`: model classes, quantisation and monkey patches."""
    from vllm_sfa_cp.platforms import choose

    choice = choose()
    if choice.active:
        from vllm_sfa_cp.registration import register_all

        register_all(choice.device)
