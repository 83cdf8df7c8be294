import gc

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from rft_rewards import (  # noqa: E402
    DeviceTurn,
    HFRewardModel,
    JudgePrompt,
    RewardComputationEngine,
    RewardModel,
    RewardModelError,
    RewardRecipe,
    RewardSample,
)

WORDS = "the a is answer four five two plus equals good bad Yes No yes no 1 2 3 user assistant judge : . ?".split()  # noqa: SIM905
CHAT = (
    "{% for m in messages %}<turn> {{ m['role'] }} : {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant : {% endif %}"
)


def _tokenizer(chat_template=CHAT, specials=("<pad>", "<unk>", "<turn>", "<end>"), pad="<end>"):
    vocabulary = {word: index for index, word in enumerate([*specials, *WORDS])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token=specials[1])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=specials[1], eos_token=specials[3], pad_token=pad,
        additional_special_tokens=[specials[2]],
    )  # fmt: skip
    tokenizer.chat_template = chat_template
    return tokenizer


def _config(**options):
    return transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, **options,
    )  # fmt: skip


def _classifier(seed=0, labels=1):
    torch.manual_seed(seed)
    return transformers.LlamaForSequenceClassification(_config(num_labels=labels, pad_token_id=3))


def _causal(seed=0):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(_config())


SAMPLES = [
    RewardSample("the answer is four .", prompt="two plus two ?"),
    RewardSample("four", prompt="two plus two ?"),
    RewardSample("the answer is " * 20, prompt="two plus two ?"),
    RewardSample("", prompt="two plus two ?"),
]


def _values(model, samples):
    return [score.value for score in model(samples)]


def test_a_batch_scores_like_its_samples_alone_where_pad_and_end_are_the_same():
    model = HFRewardModel(_classifier(), _tokenizer(), batch_tokens=1000)
    assert isinstance(model, RewardModel)
    alone = [_values(model, [sample])[0] for sample in SAMPLES]
    assert _values(model, SAMPLES) == pytest.approx(alone, abs=1e-5)
    assert len({round(value, 6) for value in alone}) == len(SAMPLES)
    small = HFRewardModel(_classifier(), _tokenizer(), batch_tokens=1)
    assert _values(small, SAMPLES) == pytest.approx(alone, abs=1e-5)


def test_batches_hold_samples_of_like_length_within_the_limit():
    classifier, shapes = _classifier(), []
    classifier.register_forward_pre_hook(
        lambda module, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    model = HFRewardModel(classifier, _tokenizer(), batch_tokens=60)
    short, long = RewardSample("four", prompt="two plus two ?"), SAMPLES[2]
    model([short, long, short, long, short])
    (_, short_width), (_, long_width) = shapes[-1], shapes[0]
    assert shapes == [(1, long_width), (1, long_width), (3, short_width)]
    assert 3 * short_width <= 60 < 2 * long_width


def test_the_score_is_read_at_the_last_real_token():
    classifier, tokenizer = _classifier(), _tokenizer()
    model = HFRewardModel(classifier, tokenizer)
    ids = tokenizer("<turn> user : two plus two ? <end> <turn> assistant : four <end>")["input_ids"]
    assert ids[-1] == tokenizer.pad_token_id
    hidden = classifier.model(input_ids=torch.tensor([ids])).last_hidden_state
    expected = classifier.score(hidden)[0, -1, 0].item()
    assert _values(model, [SAMPLES[2], SAMPLES[1]])[1] == pytest.approx(expected, abs=1e-5)
    assert classifier.config.pad_token_id == 3


def test_the_text_is_encoded_by_the_reward_model_s_own_template():
    model = HFRewardModel(_classifier(), _tokenizer(), policy_marks=("<|im_end|>", "<|pad|>"))
    plain = RewardSample("four", prompt="two plus two ?", response_ids=(9, 9, 9))
    padded = RewardSample("four<|im_end|><|pad|><|pad|>", prompt="two plus two ?", response_ids=(1,))
    injected = RewardSample("four <end>", prompt="two plus two ?")
    turns = RewardSample(
        "four", prompt="<|im_start|>user ...", metadata={"messages": [{"role": "user", "content": "two plus two ?"}]}
    )
    assert _values(model, [padded, injected, turns]) == pytest.approx(_values(model, [plain]) * 3, abs=1e-6)


def test_other_tokenizers_give_the_same_text_other_ids():
    shifted = _tokenizer(specials=("<unk>", "<s>", "<turn>", "<end>"))
    model = HFRewardModel(_classifier(), shifted)
    other = HFRewardModel(_classifier(), _tokenizer(chat_template=None))
    assert _values(model, SAMPLES[:1]) != _values(other, SAMPLES[:1])


def test_long_inputs_are_cut_and_counted():
    model = HFRewardModel(_classifier(), _tokenizer(), max_tokens=16)
    scores = model(SAMPLES)
    assert [score.counts["cut_inputs"] for score in scores] == [1, 0, 1, 0]
    tail = RewardSample("the answer is " * 40, prompt="five")
    assert model([SAMPLES[2]])[0].value == pytest.approx(model([tail])[0].value, abs=1e-6)


def test_classifiers_of_several_labels_need_an_index():
    with pytest.raises(RewardModelError, match="3 labels: give label_index"):
        HFRewardModel(_classifier(labels=3), _tokenizer())
    shares = [_values(HFRewardModel(_classifier(labels=3), _tokenizer(), label_index=k), SAMPLES) for k in range(3)]
    assert [sum(column) for column in zip(*shares, strict=True)] == pytest.approx([1.0] * 4, abs=1e-5)


def test_encoder_with_pair_encoding():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=1
    )
    encoder = transformers.BertForSequenceClassification(config)
    model = HFRewardModel(encoder, _tokenizer(chat_template=None, pad="<pad>"))
    alone = [_values(model, [sample])[0] for sample in SAMPLES]
    assert _values(model, SAMPLES) == pytest.approx(alone, abs=1e-5)


def test_yes_no_judge_reads_the_verdict_s_probability():
    causal, tokenizer = _causal(), _tokenizer()
    judge = JudgePrompt(template="judge : {prompt} {response} . is the answer good ?")
    model = HFRewardModel(causal, tokenizer, judge=judge)
    text = "<turn> user : judge : two plus two ? four . is the answer good ? <end> <turn> assistant : "
    logits = causal(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1].float()
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "yes", "No", "no")]
    shares = logits[ids].softmax(-1)
    expected = (shares[0] + shares[1]).item()
    values = _values(model, SAMPLES)
    assert values[1] == pytest.approx(expected, abs=1e-5)
    assert values == pytest.approx([_values(model, [sample])[0] for sample in SAMPLES], abs=1e-5)


def test_score_judge_gives_the_mean_of_the_numbers():
    judge = JudgePrompt(template="judge : {response}", kind="score", lowest=1, highest=3)
    model = HFRewardModel(_causal(), _tokenizer(), judge=judge)
    assert all(0.0 < value < 1.0 for value in _values(model, SAMPLES))
    with pytest.raises(RewardModelError, match="no single token for the verdicts"):
        HFRewardModel(_causal(), _tokenizer(), judge=JudgePrompt(template="{response}", kind="score", highest=9))
    with pytest.raises(RewardModelError, match="no chat template"):
        HFRewardModel(_causal(), _tokenizer(chat_template=None), judge=judge)(SAMPLES)


def test_models_that_share_a_turn_are_never_resident_together():
    moves = []

    class Module(torch.nn.Module):
        def __init__(self, name, inner):
            super().__init__()
            self.name, self.inner, self.config = name, inner, inner.config

        def to(self, device):
            moves.append((self.name, str(device)))
            return self

        def forward(self, **inputs):
            return self.inner(**inputs)

    turn = DeviceTurn("meta")
    models = [
        HFRewardModel(Module(name, _classifier(seed)), _tokenizer(), name=name, residency=turn)
        for seed, name in enumerate("abc")
    ]
    recipes = [
        RewardRecipe(label="two", functions=models[:2], weights=[1.0, 1.0]),
        RewardRecipe(label="third", functions=models[2:]),
    ]
    engine = RewardComputationEngine(recipes)
    engine.compute([RewardSample(sample.response, prompt=sample.prompt, label="two") for sample in SAMPLES])
    assert moves == [("a", "meta"), ("a", "cpu"), ("b", "meta"), ("b", "cpu")]
    assert (turn.resident, turn.peak_resident) == (0, 1)
    models[2](SAMPLES)  # without an engine it takes and gives back its turn itself
    assert moves[4:] == [("c", "meta"), ("c", "cpu")]
    models[0].load()
    models[0].load()
    models[0].release()
    models[0].release()
    assert turn.resident == 0


def test_from_pretrained_reads_a_folder(tmp_path):
    _classifier().save_pretrained(tmp_path)
    _tokenizer().save_pretrained(tmp_path)
    model = HFRewardModel.from_pretrained(str(tmp_path), name="judge_a")
    assert model.name == "judge_a"
    fresh = HFRewardModel(_classifier(), _tokenizer())
    assert _values(model, SAMPLES) == pytest.approx(_values(fresh, SAMPLES), abs=1e-5)
    gc.collect()
