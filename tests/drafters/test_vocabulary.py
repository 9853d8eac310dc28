"""When two vocabularies count as one, and what is translated when they do not; against brute force."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from paceline import LLM, DraftModel, SamplingParams
from paceline.drafters.vocabulary import VocabularyMap, match
from paceline.errors import PacelineError, VocabularyError
from tests.fakes import tiny_model
from tests.tokens import CORPUS, NUM_IDS, tokenizer

CPU = torch.device("cpu")


@dataclass
class Words:
    """As much of a tokenizer as matters here."""

    texts: dict[int, str]
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    unk_token_id: int | None = None

    def get_vocab(self) -> dict[str, int]:
        return {text: index for index, text in self.texts.items()}


def words(*texts: str, **special: int) -> Words:
    return Words(dict(enumerate(texts)), **special)


def one(target: Any, draft: Any, target_size: int, draft_size: int) -> VocabularyMap:
    return match(target, draft, (target_size, draft_size), False, CPU)


def proposable(found: VocabularyMap, draft_size: int) -> set[int]:
    """Target ids that can be drawn at all."""
    row = found.to_target(torch.arange(draft_size, dtype=torch.float32)[None])[0]
    return set(torch.nonzero(torch.isfinite(row))[:, 0].tolist())


# One vocabulary.


def test_equal_vocabularies_pass_everything_through() -> None:
    found = one(words("a", "b", "c"), words("a", "b", "c"), 3, 3)
    logits, ids = torch.randn(2, 3), torch.tensor([2, 0])
    assert found.to_target(logits) is logits and found.to_draft(ids) is ids


@pytest.mark.parametrize("target_size, draft_size", [(97, 104), (104, 97), (104, 104), (97, 97), (100, 104)])
def test_padding_of_either_head_is_tolerated_and_never_proposed(target_size: int, draft_size: int) -> None:
    both = Words({index: f"t{index}" for index in range(97)})
    found = one(both, both, target_size, draft_size)
    logits = torch.randn(3, draft_size)
    moved = found.to_target(logits)
    assert moved.shape == (3, target_size) and torch.equal(moved[:, :97], logits[:, :97])
    assert proposable(found, draft_size) == set(range(97))


def test_heads_that_cannot_agree_are_refused_where_only_one_has_a_tokenizer() -> None:
    with pytest.raises(VocabularyError, match="has 300 ids and the target's 49152, and only one of the two has"):
        one(words("a"), None, 49152, 300)


def test_without_tokenizers_the_smaller_head_is_the_vocabulary() -> None:
    assert proposable(one(None, None, 97, 104), 104) == set(range(97))
    assert proposable(one(None, words("a"), 104, 97), 97) == set(range(97))


def test_a_tokenizer_that_ends_earlier_limits_what_is_proposed() -> None:
    found = one(words("a", "b", "c", "<x>"), words("a", "b", "c"), 4, 4)
    assert proposable(found, 4) == {0, 1, 2}


@pytest.mark.parametrize("target_size, draft_size", [(3, 4), (4, 3), (3, 3)])
def test_ids_a_tokenizer_has_beyond_a_head_are_left_out(target_size: int, draft_size: int) -> None:
    both = words("a", "b", "c", "<added>", "<more>")
    assert proposable(one(both, both, target_size, draft_size), draft_size) == {0, 1, 2}


def test_a_target_id_the_draft_model_lacks_is_read_as_unknown() -> None:
    target, draft = words("a", "b", "c", "d"), words("a", "b", "u", unk_token_id=1)
    draft.texts[2] = "c"
    assert one(target, draft, 4, 3).to_draft(torch.tensor([0, 2, 3])).tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    "target, draft, index",
    [
        (words("a", "b", "c"), words("a", "x", "c"), 1),
        (words("a", "b", "c"), words("b", "a", "x"), 0),
        (Words({0: "a", 1: "b", 2: "c"}), Words({0: "a", 2: "c"}), 1),
        (Words({0: "a", 2: "c"}), Words({0: "a", 1: "b", 2: "c"}), 1),
    ],
)
def test_a_real_difference_is_refused_naming_the_first_id(target: Words, draft: Words, index: int) -> None:
    with pytest.raises(VocabularyError, match=rf"at id {index} \(") as caught:
        one(target, draft, 3, 3)
    assert isinstance(caught.value, PacelineError) and "cross_vocabulary=True" in str(caught.value)


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id"])
def test_special_ids_must_agree_where_both_have_them(name: str) -> None:
    with pytest.raises(VocabularyError, match=f"{name} is 1, the target's 0"):
        one(words("a", "b", **{name: 0}), words("a", "b", **{name: 1}), 2, 2)
    one(words("a", "b", **{name: 0}), words("a", "b"), 2, 2)


texts = st.lists(st.sampled_from("abcdefg"), unique=True, max_size=6)


def compatible(target: dict[int, str], draft: dict[int, str]) -> bool:
    """The rule, word for word: agree where both define; what one lacks lies at or beyond that one's length."""
    for index in target.keys() | draft.keys():
        if index in target and index in draft:
            if target[index] != draft[index]:
                return False
        elif index < len(draft if index not in draft else target):
            return False
    return True


@given(texts, texts, st.integers(0, 6))
@settings(max_examples=300, deadline=None)
def test_the_rule_of_one_vocabulary_is_kept_for_ids_without_holes(
    first: list[str], second: list[str], common: int
) -> None:
    """Ids count from 0, as tokenizers count. The two begin with `common` equal tokens, or differ from the start."""
    draft = [*first[:common], *(text for text in second if text not in first[:common])]
    fits = compatible(dict(enumerate(first)), dict(enumerate(draft)))
    try:
        found = one(words(*first), words(*draft), 16, 16)
    except VocabularyError as error:
        differing = next(i for i, (ours, theirs) in enumerate(zip(first, draft)) if ours != theirs)
        assert not fits and f"at id {differing} " in str(error)
    else:
        assert fits and proposable(found, 16) == set(range(min(len(first), len(draft))))


def test_an_id_the_target_lacks_in_its_middle_is_refused_even_beyond_the_drafts_length() -> None:
    target, draft = {0: "a", 2: "c", 4: "e", 5: "f", 6: "g"}, {0: "a", 3: "d"}
    assert not compatible(target, draft)
    with pytest.raises(VocabularyError, match="id 3"):
        one(Words(target), Words(draft), 7, 7)


# Two vocabularies.


@functools.cache
def metaspace() -> Any:
    """A second small tokenizer, of the family that writes a leading space as U+2581."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    made.train_from_iterator([*CORPUS, "riding the draft ahead"] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def plain_texts(made: Any, mark: str) -> dict[str, int]:
    """Text with real spaces → the lowest id."""
    result: dict[str, int] = {}
    for text, index in sorted(made.get_vocab().items(), key=lambda item: item[1]):
        result.setdefault(text.replace(mark, " "), index)
    return result


@pytest.mark.parametrize("swap", [False, True])
def test_two_vocabularies_meet_in_the_tokens_they_share(swap: bool) -> None:
    sides = [(tokenizer(), "\u0120", NUM_IDS), (metaspace(), "\u2581", len(metaspace()))]
    (target, target_mark, target_size), (draft, draft_mark, draft_size) = sides[::-1] if swap else sides
    ours, theirs = plain_texts(target, target_mark), plain_texts(draft, draft_mark)
    pairs = {theirs[text]: ours[text] for text in ours.keys() & theirs.keys()}
    assert len(pairs) > 20 and any(text.startswith(" ") and len(text) > 2 for text in ours.keys() & theirs.keys())
    found = match(target, draft, (target_size, draft_size), True, CPU)
    assert dict(zip(found.draft_ids.tolist(), found.target_ids.tolist())) == pairs
    logits = torch.randn(1, draft_size)
    expected = torch.full((1, target_size), float("-inf"))
    for from_, to in pairs.items():
        expected[0, to] = logits[0, from_]
    assert torch.equal(found.to_target(logits), expected)
    back = {to: from_ for from_, to in pairs.items()}
    unknown = draft.unk_token_id if draft.unk_token_id is not None else draft.eos_token_id
    assert found.to_draft(torch.arange(target_size)).tolist() == [back.get(i, unknown) for i in range(target_size)]


def test_space_marks_become_spaces_and_the_lowest_id_wins() -> None:
    target = words("\u0120the", "the", "x", "\u0120")
    draft = words("z", "\u2581the", "the", "\u2581")
    found = match(target, draft, (4, 4), True, CPU)
    assert sorted(zip(found.draft_ids.tolist(), found.target_ids.tolist())) == [(1, 0), (2, 1), (3, 3)]
    doubled = words("a", "\u2581b", " b")
    found = match(words("b", " b"), doubled, (2, 3), True, CPU)
    assert list(zip(found.draft_ids.tolist(), found.target_ids.tolist())) == [(1, 1)]


def test_shared_ids_beyond_a_head_are_left_out() -> None:
    found = match(words("a", "b", "c"), words("c", "b", "a"), (2, 2), True, CPU)
    assert sorted(zip(found.draft_ids.tolist(), found.target_ids.tolist())) == [(1, 1)]


def test_vocabularies_with_nothing_in_common_and_missing_tokenizers_are_refused() -> None:
    with pytest.raises(VocabularyError, match="share no token"):
        match(words("a"), words("b"), (1, 1), True, CPU)
    with pytest.raises(VocabularyError, match="needs the tokenizers of both"):
        match(None, words("b"), (1, 1), True, CPU)


def test_a_draft_model_with_another_tokenizer_drafts_shared_tokens_and_the_text_stays() -> None:
    target = tiny_model(vocab=NUM_IDS)
    prompt = [int(i) for i in tokenizer().encode("the rider ahead", add_special_tokens=False)]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=10, ignore_eos=True)
    plain = LLM(target, None, tokenizer(), kernels="reference", max_model_len=64).generate([prompt], params)
    size = len(metaspace())
    config = DraftModel(tiny_model(layers=1, vocab=size), 3, cross_vocabulary=True, tokenizer=metaspace())
    drafted: list[int] = []
    llm = LLM(target, config, tokenizer(), kernels="reference", max_model_len=64)
    made: Any = llm.engine.drafter
    propose = made.propose

    def spy(context: Any) -> Any:
        proposal = propose(context)
        drafted.extend(proposal.tokens.flatten().tolist())
        return proposal

    made.propose = spy
    output = llm.generate([prompt], params)[0].outputs[0]
    assert output.token_ids == plain[0].outputs[0].token_ids
    assert drafted and set(drafted) <= set(made.vocabulary.target_ids.tolist())
