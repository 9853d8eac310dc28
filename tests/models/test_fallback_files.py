"""What the fallback takes and what it refuses: folders, objects, code that comes with them, drafters."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline import LLM, DraftModel, NGram, SamplingParams
from paceline.errors import CheckpointError, OptionError, PacelineError
from paceline.models.fallback import Fallback
from paceline.models.fallback_files import FallbackSource, find_positions, refuse
from paceline.testing import prompts, tiny_model, tokens_of
from tests.drafters import contract
from tests.models import own_code
from tests.models.fallback_families import GATED, make
from tests.models.folders import configure, continued, greedy, rewrite
from tests.sentences import assert_sentence


@pytest.fixture
def phi(tmp_path: Path) -> Path:
    make("phi3").save_pretrained(tmp_path / "phi")
    return tmp_path / "phi"


def load(model: Any, **options: Any) -> LLM:
    return LLM(str(model) if isinstance(model, Path) else model, **{"kernels": "torch", "max_model_len": 64, **options})


def refused(model: Any, *named: str, **options: Any) -> None:
    with pytest.raises(PacelineError) as caught:
        load(model, **options)
    assert_sentence(caught.value, *named)


# What is loaded.


@pytest.mark.parametrize("kernels", ["auto", "torch", "reference"])
def test_a_folder_says_what_transformers_says(phi: Path, kernels: str) -> None:
    llm = load(phi, kernels=kernels)
    assert llm.model.ops.name == ("reference" if kernels == "reference" else "torch")
    assert greedy(llm) == continued(make("phi3"))


def test_one_line_says_that_it_is_the_fallback(
    phi: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        load(phi)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "Phi3ForCausalLM" in told[0] and "fallback" in told[0] and "slower" in told[0]
    assert "Loading weights" not in capfd.readouterr().err


def test_a_model_of_16_bits_keeps_its_cache_in_16_bits(phi: Path) -> None:
    llm = load(phi, dtype="bfloat16")
    assert {part.dtype for spec in llm.model.layer_specs(torch.float32) for part in spec.parts} == {torch.bfloat16}
    assert len(greedy(llm)) == 3


def test_an_object_stays_as_it_is() -> None:
    model = make("phi3")
    llm = load(model, dtype="bfloat16")
    assert isinstance(llm.model, Fallback) and llm.model.module is not model
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    same = load(model).model
    assert isinstance(same, Fallback) and same.module is model, "what fits is not copied"


def test_a_missing_tensor_is_refused_and_one_too_many_is_told(phi: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(state: dict[str, Any]) -> None:
        state["more"] = torch.zeros(3)

    def drop(state: dict[str, Any]) -> None:
        del state["model.layers.1.mlp.down_proj.weight"]

    rewrite(phi, add)
    with caplog.at_level(logging.WARNING):
        load(phi)
    assert any("does not use: more" in record.getMessage() for record in caplog.records)
    rewrite(phi, drop)
    refused(phi, str(phi), "model.layers.1.mlp.down_proj.weight")


def test_a_tensor_of_another_shape_is_refused(phi: Path) -> None:
    def cut(state: dict[str, Any]) -> None:
        state["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 7)

    rewrite(phi, cut)
    refused(phi, str(phi))


def test_a_config_that_its_module_cannot_run_is_refused(tmp_path: Path) -> None:
    make("mpt").save_pretrained(tmp_path / "mpt")
    configure(tmp_path / "mpt", n_heads=3)
    refused(tmp_path / "mpt", "MptForCausalLM cannot be run")
    configure(tmp_path / "mpt", n_heads="three")
    refused(tmp_path / "mpt", str(tmp_path / "mpt"))


def test_what_needs_code_of_ours_is_refused(phi: Path) -> None:
    refused(phi, "kernels='native'", "torch, reference", kernels="native")
    refused(phi, "quantization='int8'", quantization="int8")
    refused(phi, "'phi3'", "llama", model_impl="paceline")
    refused(phi, "model_impl='vllm'", "auto, paceline, transformers", model_impl="vllm")
    configure(phi, quantization_config={"quant_method": "gptq"})
    refused(phi, "gptq")


def test_rope_that_changes_with_the_length_ends_before_it_changes() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config = transformers.Phi3Config(**GATED, original_max_position_embeddings=64, rope_parameters=rope)
    assert (config.max_position_embeddings, find_positions(config)) == (256, 64)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert find_positions(transformers.StableLmConfig(**GATED, rope_parameters=dynamic)) == 256


# What is not.

RECURRENT = (
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h "
    "olmo_hybrid qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
)


@pytest.mark.parametrize("kind", RECURRENT.split())
def test_recurrent_and_hybrid_models_are_refused_by_name(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    with pytest.raises(CheckpointError) as caught:
        refuse(FallbackSource(config, "the folder"))
    assert_sentence(caught.value, "the folder", f"a {kind} model", "cannot be rolled back by length")


def test_a_recurrent_folder_is_refused_before_its_weights_are_read(folder: Path) -> None:
    configure(folder, model_type="mamba")
    refused(folder, "a mamba model", "rolled back")


def test_encoders_are_refused(folder: Path) -> None:
    configure(folder, model_type="t5")
    refused(folder, "t5", "encoder")
    configure(folder, model_type="vit")
    refused(folder, "vit", "generates no text")


def test_a_model_that_looks_ahead_is_refused() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(transformers.BertConfig(vocab_size=97, initializer_range=0.4, **shape)).eval()
    refused(model, "BertLMHeadModel", "see what comes behind")


def test_a_model_with_a_state_that_its_config_hides_is_refused() -> None:
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**GATED)).eval()
    before: list[Any] = [0.0]

    def remember(module: Any, args: Any, out: Any) -> Any:
        mixed = out + before[0]
        before[0] = mixed[:, -1:].detach()
        return mixed

    model.model.layers[0].register_forward_hook(remember)
    refused(model, "Phi3ForCausalLM")


def test_a_model_that_ignores_its_cache_is_refused() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    refused(transformers.OpenAIGPTLMHeadModel(config).eval(), "OpenAIGPTLMHeadModel", "keys and values")


# Drafters.


def make_llama(drafter: Any = None, **options: Any) -> LLM:
    given = {"kernels": "reference", "max_model_len": 200, "model_impl": "transformers", **options}
    return LLM(tiny_model(), drafter=drafter, **given)


@functools.cache
def plain_llama() -> list[list[int]]:
    return tokens_of(make_llama(), 3, "seeded")


HEADS = ("medusa_tree", "mlp_speculator", "hydra", "hydra_prefix_tree", "eagle", "eagle_dynamic", "eagle3", "dflash")
OTHERS = ("suffix_tree", "lookahead", "pard", "first_of", "draft_is_target")
ACCEPTED = (
    "medusa_tree",
    "mlp_speculator",
    "hydra",
    "hydra_prefix_tree",
    "first_of",
    "draft_is_target",
)  # those who know


@pytest.mark.parametrize("name", [*HEADS, *OTHERS])
def test_heads_and_drafters_of_their_own_draft_for_it(name: str) -> None:
    wanted = plain_llama()
    known = {tuple(prompt): prompt + said for prompt, said in zip(prompts(3), wanted)}
    llm = make_llama(contract.DRAFTERS[name](known))
    assert tokens_of(llm, 3, "seeded") == wanted
    assert sum(round.proposed for round in llm.engine.stats.recent)
    if name in ACCEPTED:
        assert sum(round.accepted for round in llm.engine.stats.recent)


@pytest.mark.parametrize("name", ["early_exit", "glide"])
def test_drafters_that_borrow_layers_are_refused(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        make_llama(contract.DRAFTERS[name]({}))
    assert_sentence(caught.value, "target's own layers", "draft models")


def test_a_model_of_another_family_drafts_too() -> None:
    """It drafts for itself, so everything is accepted; its prompt comes in chunks."""
    wanted = tokens_of(LLM(make("bloom"), kernels="reference", max_model_len=200), 3, "greedy")
    drafter = DraftModel(make("bloom"), 4)
    llm = LLM(make("bloom"), drafter=drafter, kernels="reference", max_model_len=200, max_batched_tokens=9)
    assert tokens_of(llm, 3, "greedy") == wanted
    proposed, accepted = (
        sum(getattr(one, name) for one in llm.engine.stats.recent) for name in ("proposed", "accepted")
    )
    assert accepted >= 0.8 * proposed > 0


# Code that comes with a checkpoint.


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_code.keep_apart(monkeypatch, tmp_path / "modules")
    return own_code.write(tmp_path / "own")


def test_code_in_a_checkpoint_is_run_only_if_it_is_trusted(own: Path) -> None:
    refused(own, str(own), "code of its own", "trust_remote_code=True", "--trust-remote-code")
    assert not (own / "was-run").exists()
    llm = load(own, trust_remote_code=True)
    assert (own / "was-run").exists() and isinstance(llm.model, Fallback)


def test_a_checkpoint_with_its_own_code_says_the_same_with_every_drafter(own: Path) -> None:
    """It takes no mask and no positions, so sequences of different length are computed apart."""
    options = {"trust_remote_code": True, "kernels": "reference", "max_model_len": 200}
    plain = LLM(str(own), **options)
    wanted = tokens_of(plain, 3, "seeded")
    assert tokens_of(LLM(str(own), drafter=NGram(5, min_match=1), **options), 3, "seeded") == wanted
    quick = load(own, trust_remote_code=True)
    assert isinstance(quick.model, Fallback) and not quick.model.pads
    assert greedy(quick) == greedy(plain)
    said = quick.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert [len(one.outputs[0].token_ids) for one in said] == [8, 8, 8]
