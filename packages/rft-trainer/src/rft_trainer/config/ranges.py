"""Checks of numbers that the groups of settings share."""


def below(options: object, least: int, *names: str) -> list[str]:
    """One line for each named setting that is smaller than `least`; a setting that is None was left out."""
    remedy = "give 0 or more" if least == 0 else f"give at least {least}"
    values = {name: getattr(options, name) for name in names}
    return [f"{name} is {value}: {remedy}" for name, value in values.items() if value is not None and value < least]
