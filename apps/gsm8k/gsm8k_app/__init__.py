"""The modules of the gsm8k app, imported by its `__main__` and by the tests."""

__all__: list[str] = []
