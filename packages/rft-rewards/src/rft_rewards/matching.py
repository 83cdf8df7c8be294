"""Does an answer say the same as the gold answer: numbers first, then plain text."""

from rft_rewards.plain_text import plain_characters
from rft_rewards.quantity import Quantity, parse_quantity, unwrapped


def quantities_match(answer: Quantity, gold: Quantity) -> bool:
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    return answer.value == gold.value


def quick_verdict(answer: str, gold: str) -> bool | None:
    if not answer.strip() or not gold.strip():
        return False
    if answer == gold:
        return True
    ours, theirs = parse_quantity(answer), parse_quantity(gold)
    if ours is not None and theirs is not None:
        return quantities_match(ours, theirs)
    if plain_characters(unwrapped(answer)).casefold() == plain_characters(unwrapped(gold)).casefold():
        return True
    return None


def answers_match(answer: str | None, gold: str) -> bool:
    """True when the bare answer `answer` says the same as the bare gold answer."""
    return answer is not None and bool(quick_verdict(answer, gold))
