"""Encoding: the template once, one BOS token at most, the length limit by error or by count."""

import pytest

from rft_trainer.data import PromptDataset, PromptRecord
from rft_trainer.errors import ConfigurationError

WORDS = ["<bos>", "<eos>", "<unk>", "user", ":", "1", "+", "2", "bot", "be", "brief"]
TEMPLATE = (
    "<bos>{% for message in messages %} {{ message['role'] }} : {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} bot :{% endif %}"
)


def make_tokenizer(chat_template=TEMPLATE, closes=False):
    """Whole words as tokens; adds <bos> (and with `closes` also <eos>) by itself, as many real tokenizers do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single = "<bos> $A <eos>" if closes else "<bos> $A"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 0), ("<eos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


def record(content, line=1):
    return PromptRecord(
        messages=({"role": "user", "content": content},), text=content, id=f"a.jsonl:{line}", origin=f"a.jsonl:{line}"
    )


def words(prompt):
    return [WORDS[token] for token in prompt.token_ids]


def test_the_template_is_applied_with_one_bos():
    data = PromptDataset([record("1 + 2")], make_tokenizer(), max_prompt_tokens=9)
    assert words(data[0]) == ["<bos>", "user", ":", "1", "+", "2", "bot", ":"]
    assert data[0].text == "<bos> user : 1 + 2 bot :"
    assert (len(data), data.dropped) == (1, 0)


def test_a_template_without_bos_is_taken_at_its_word():
    data = PromptDataset([record("1 + 2")], make_tokenizer(TEMPLATE.replace("<bos>", "")), max_prompt_tokens=9)
    assert words(data[0])[:2] == ["user", ":"]


@pytest.mark.parametrize("text", ["1 + 2", "<bos> 1 + 2"])
@pytest.mark.parametrize("closes", [False, True])
def test_plain_text_has_one_bos_and_stays_open(text, closes):
    tokenizer = make_tokenizer(chat_template=None, closes=closes)
    data = PromptDataset([record(text)], tokenizer, max_prompt_tokens=9, apply_chat_template=False)
    assert words(data[0]) == ["<bos>", "1", "+", "2"]


def test_a_missing_template_is_an_error():
    with pytest.raises(ConfigurationError, match=r"has no chat template; use the folder of a chat model"):
        PromptDataset([record("1")], make_tokenizer(chat_template=None), max_prompt_tokens=9)


def test_a_refusing_template_names_the_row():
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:4: the chat template refuses .*roles must alternate"):
        PromptDataset([record("1", 4)], tokenizer, max_prompt_tokens=9)


def test_long_prompts_are_listed_or_dropped():
    records = [record("1", 1), record("1 + 2", 2), record("1", 3), record("1 + 2 + 2", 7)]
    message = r"2 of 4 prompts are longer than 6 tokens: a\.jsonl:2 \(8\), a\.jsonl:7 \(10\); raise .* to 10"
    with pytest.raises(ConfigurationError, match=message):
        PromptDataset(records, make_tokenizer(), max_prompt_tokens=6)
    data = PromptDataset(records, make_tokenizer(), max_prompt_tokens=6, too_long="drop")
    assert [prompt.record.origin for prompt in data] == ["a.jsonl:1", "a.jsonl:3"]
    assert data.dropped == 2


def test_many_long_prompts_are_counted_after_ten():
    records = [record("1 + 2", line) for line in range(1, 14)]
    with pytest.raises(ConfigurationError, match=r"13 of 13 .*a\.jsonl:10 \(8\) and 3 more"):
        PromptDataset(records, make_tokenizer(), max_prompt_tokens=6, too_long="drop")


def test_bad_settings_are_named():
    with pytest.raises(ConfigurationError, match="max_prompt_tokens is 0"):
        PromptDataset([record("1")], make_tokenizer(), max_prompt_tokens=0)
    with pytest.raises(ConfigurationError, match="too_long is 'cut'"):
        PromptDataset([record("1")], make_tokenizer(), max_prompt_tokens=9, too_long="cut")
    with pytest.raises(ConfigurationError, match="there are no prompts"):
        PromptDataset([], make_tokenizer(), max_prompt_tokens=9)
