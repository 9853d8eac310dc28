"""The scripts and commands of four manuals, as they are written there but for the import or the command's name.

Kept are the calls, which are facts of an interface; what is asked and said between them is ours.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers
import typer
from typer.testing import CliRunner

from paceline.cli import app
from paceline.compat import table
from paceline.models.hub import SMALL, look
from tests.cli.checkpoints import make_tokenizer, write_checkpoint
from tests.drafters.tiny_medusa import vicuna_heads
from tests.drafters.tiny_mlp import accelerator
from tests.drafters.tiny_readers import glide_state, write_glide

RUNNER = CliRunner()
VLLM = """
from vllm import LLM, SamplingParams

prompts = ["the rider in front"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="facebook/opt-6.7b", tensor_parallel_size=1, {words})
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"{{prompt!r}}, {{generated_text!r}}")
"""
VLLM_WORDS = [
    'speculative_model="facebook/opt-125m", num_speculative_tokens=5',
    'speculative_model="facebook/opt-125m", num_speculative_tokens=5, use_v2_block_manager=True',
    'speculative_config={"model": "facebook/opt-125m", "num_speculative_tokens": 5}',
    'speculative_model="[ngram]", num_speculative_tokens=5, ngram_prompt_lookup_max=4, use_v2_block_manager=True',
    'speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
    'speculative_config={"method": "suffix", "num_speculative_tokens": 32}',
]
MLP_WORDS = [
    'speculative_model="ibm-ai-platform/llama3-70b-accelerator", speculative_draft_tensor_parallel_size=1',
    'speculative_config={"model": "ibm-ai-platform/llama3-70b-accelerator", "draft_tensor_parallel_size": 1}',
    'speculative_config={"method": "mlp_speculator", "model": "ibm-ai-platform/llama3-70b-accelerator"}',
]
VLLM_CHAT = """
from vllm import LLM, SamplingParams

llm = LLM(model="facebook/opt-6.7b", enforce_eager=True)
sampling_params = SamplingParams(temperature=0, max_tokens=6)
conversation = [{"role": "system", "content": "the line"}, {"role": "user", "content": "the rider"}]
one = llm.chat(conversation, sampling_params, use_tqdm=False)
many = llm.chat([conversation for _ in range(3)], sampling_params, use_tqdm=True)
chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
other = llm.chat([conversation], sampling_params, use_tqdm=False, chat_template=chat_template)
plain = llm.generate(["the line the rider "], sampling_params, use_tqdm=False, lora_request=None)
"""
COLOSSAL = """
from transformers import AutoTokenizer, AutoModelForCausalLM

import colossalai
from colossalai.inference.config import InferenceConfig
from colossalai.inference.core.engine import InferenceEngine, GenerationConfig
from colossalai.inference.modeling.models.glide_llama import GlideLlamaForCausalLM, GlideLlamaConfig

colossalai.launch_from_torch(config={})
model = AutoModelForCausalLM.from_pretrained("lmsys/vicuna-7b-v1.5")
tokenizer = AutoTokenizer.from_pretrained("lmsys/vicuna-7b-v1.5")
tokenizer.pad_token = tokenizer.eos_token
drafter_model = AutoModelForCausalLM.from_pretrained("JackFram/llama-68m")
inference_config = InferenceConfig(
    dtype="fp16",
    max_batch_size=1,
    max_input_len=256,
    max_output_len=256,
    prefill_ratio=1.2,
    block_size=16,
    max_n_spec_tokens=5,
    prompt_template="vicuna",
)
engine = InferenceEngine(model, tokenizer, inference_config, verbose=True)
engine.enable_spec_dec(drafter_model)
generation_config = GenerationConfig(
    pad_token_id=tokenizer.eos_token_id,
    eos_token_id=tokenizer.eos_token_id,
    max_length=256,
    num_beams=1,
    do_sample=False,
)
out = engine.generate(prompts=["the rider in front"], generation_config=generation_config)
print(out)
"""
GLIDE = """
glide_config = GlideLlamaConfig(
    intermediate_size=8192,
    large_hidden_size=4096,
    large_num_attention_heads=32,
    num_hidden_layers=1,
)
drafter_model = GlideLlamaForCausalLM.from_pretrained("cxdu/glide47m-vicuna7b", config=glide_config)
engine.enable_spec_dec(drafter_model, use_glide_drafter=True)
"""
LMFLOW = (
    "python speculative_inference.py --model gpt2-xl --draft_model gpt2 --gamma 5 --max_new_tokens 8 --temperature {}"
)
PADDLE = "python predictor.py --model_name_or_path meta-llama/Llama-2-7b-chat --inference_model --dtype float16 "
REFERENCE = "--speculate_method inference_with_reference --speculate_max_draft_token_num 5 --speculate_max_ngram_size 2"
EXPORT = (
    "python export_model.py --model_name_or_path deepseek-ai/DeepSeek-V3 --output_path /path/to/exported_model "
    "--dtype bfloat16 --inference_model 1 --append_attn 1 --total_max_length 8192 --quant_type weight_only_int8 "
    "--speculate_method inference_with_reference --return_full_hidden_states 1 --mla_use_matrix_absorption 1"
)
# Every field of PredictorArgument, ModelArgument and ExportArgument.
PADDLE_FLAGS = """model_name_or_path model_prefix src_length min_length max_length top_k top_p temperature
repetition_penalty device dtype lora_path export_precache prefix_path decode_strategy dynamic_insert
use_flash_attention mode inference_model quant_type avx_model avx_type avx_cachekv_type batch_size benchmark
use_fake_parameter block_attn block_size cachekv_int8_type append_attn chat_template total_max_length speculate_method
speculate_max_draft_token_num speculate_max_ngram_size speculate_verify_window speculate_max_candidate_len
draft_model_name_or_path draft_model_quant_type return_full_hidden_states mla_use_matrix_absorption
weightonly_group_size weight_block_size moe_quant_type output_via_mq model_type data_file output_file output_path"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("manuals") / "tiny")
    write_glide(folder.parent / "glide", state=glide_state(vocab=len(make_tokenizer())))
    return folder


@pytest.fixture(autouse=True)
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever is asked of the hub is the same tiny model, or a drafter for it; answers the names asked for."""
    asked: list[str] = []
    small = checkpoint.parent / "glide"

    def deliver(name: str, patterns: tuple[str, ...] = ()) -> Path:
        if patterns != SMALL:  # which are asked for to tell what a repository holds
            asked.append(name)
        heads = {"accelerator": accelerator, "medusa": vicuna_heads}
        made = next((write for word, write in heads.items() if word in name), None)
        if made is not None:
            return Path(made(len(make_tokenizer())))
        return small if "glide" in name else checkpoint

    monkeypatch.setattr("paceline.models.hub.download", deliver)
    look.cache_clear()
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        real = kind.from_pretrained
        monkeypatch.setattr(kind, "from_pretrained", lambda name, real=real, **more: real(checkpoint, **more))
    return asked


def run_script(text: str) -> dict[str, Any]:
    """The names it leaves behind. Only lines that import are changed."""
    text = re.sub(r"^from vllm import", "from paceline import", text, flags=re.MULTILINE)
    text = re.sub(r"^import colossalai$", "import paceline.compat.colossal as colossalai", text, flags=re.MULTILINE)
    text = re.sub(r"^from colossalai[\w.]* import", "from paceline.compat.colossal import", text, flags=re.MULTILINE)
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def type_in(text: str, asked: str = "the rider") -> Any:
    """`python SCRIPT.py` is the one part that is typed otherwise."""
    return RUNNER.invoke(app, shlex.split(re.sub(r"^python \w+\.py", "generate", text)), input=asked)


# vLLM


@pytest.mark.parametrize("words", VLLM_WORDS)
def test_vllms_scripts_run(words: str, capsys: pytest.CaptureFixture[str], hub: list[str]) -> None:
    names = run_script(VLLM.format(words=words))
    assert capsys.readouterr().out.startswith("'the rider in front', ")
    assert 1 <= len(names["outputs"][0].outputs[0].token_ids) <= 16  # vLLM's default
    assert hub == ["facebook/opt-6.7b", *(["facebook/opt-125m"] if "opt-125m" in words else [])]
    assert names["llm"].engine.drafter is not None


@pytest.mark.parametrize("words", MLP_WORDS)
def test_vllms_mlp_script_runs_with_the_accelerators_own_draft_length(words: str, hub: list[str]) -> None:
    names = run_script(VLLM.format(words=words))
    assert hub == ["facebook/opt-6.7b", "ibm-ai-platform/llama3-70b-accelerator"]
    drafter = names["llm"].engine.drafter
    assert (drafter.name, drafter.max_nodes) == ("mlp_speculator", 3)
    assert sum(names["outputs"][0].outputs[0].stats.proposed) > 0


def test_vllms_medusa_words_run(hub: list[str]) -> None:
    given = {"method": "medusa", "model": "abhigoyal/vllm-medusa-llama-68m-random", "num_speculative_tokens": 3}
    drafter = run_script(VLLM.format(words=f"speculative_config={given}"))["llm"].engine.drafter
    assert hub[1:] == [given["model"]] and (drafter.name, drafter.max_nodes) == ("medusa", 3)


def test_vllms_chat_script_runs() -> None:
    names = run_script(VLLM_CHAT)
    one, many, other, plain = (
        [out.outputs[0].token_ids for out in names[n]] for n in ("one", "many", "other", "plain")
    )
    assert many == one * 3
    assert other == plain != one


# Colossal-Inference


def test_colossal_inferences_script_runs_up_to_the_drafter_that_is_not_there_yet(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_script(COLOSSAL)
    notices = [record.getMessage() for record in caplog.records]
    assert notices[0] == "launch_from_torch has no effect: one process runs the model"
    engine, (text,) = names["engine"], names["out"]
    assert "USER: the rider in front ASSISTANT:" in text and not text.endswith("ASSISTANT:")
    assert capsys.readouterr().out.strip() == str([text])
    assert engine.llm.engine.drafter.max_nodes == 5 and engine.llm.max_model_len == 512
    engine.disable_spec_dec()
    assert engine.generate(prompts=["the rider in front"], generation_config=names["generation_config"]) == [text]
    exec(GLIDE, names)
    assert engine.llm.engine.drafter.name == "glide" and engine.llm.engine.drafter.max_nodes == 5
    assert engine.generate(prompts=["the rider in front"], generation_config=names["generation_config"]) == [text]


# LMFlow


@pytest.mark.parametrize("temperature", ["0.3 --seed 1", "0."])
def test_lmflows_command_runs_with_hub_names_that_have_no_slash(temperature: str, hub: list[str]) -> None:
    text = LMFLOW.format(temperature) + " --raw"
    given = type_in(text + " --interactive 0 --user_input '- the rider'", asked="")
    asked = type_in(text, asked="- the rider")
    assert (given.exit_code, asked.exit_code) == (0, 0), given.output + asked.output
    assert given.stdout == asked.stdout != "\n"
    assert hub == ["gpt2-xl", "gpt2"] * 2


def test_lmflows_interactive_command_is_the_chat() -> None:
    text = LMFLOW.format("0.").replace("python speculative_inference.py", "chat") + " --interactive 1"
    result = RUNNER.invoke(app, shlex.split(text), input="the rider\n")
    assert result.exit_code == 0 and result.stdout.strip(), result.output
    assert "--interactive 1 has no effect here; paceline chat goes on asking" in result.stderr


# PaddleNLP


def test_paddlenlps_command_runs(hub: list[str]) -> None:
    result = type_in(PADDLE + REFERENCE + " --max_length 8")
    assert result.exit_code == 0 and result.stdout.strip(), result.output
    assert hub == ["meta-llama/Llama-2-7b-chat"]


@pytest.mark.parametrize(
    "text, said",
    [
        (EXPORT, "--output_path /path/to/exported_model is not there yet; models cannot be exported; "),
        (PADDLE + "--mode static", "--mode static is not there yet; models cannot be exported; "),
        (PADDLE + "--device gcu", "'gcu' cannot be used; allowed: auto, cpu, cuda, cuda:N or a device PyTorch has"),
        (PADDLE + "--device npu", "'npu' cannot be used; allowed: auto, cpu, cuda, cuda:N or a device PyTorch has"),
        (PADDLE + "--quant_type a8w8c8_fp8", "a8w8c8_fp8 is not supported; supported: weight_only_int8"),
        (PADDLE + "--weight_block_size 128 128", "--weight_block_size 128 is not supported; quant_type says"),
        (PADDLE + "--data_file ./data/dev.json", "--data_file ./data/dev.json is not supported; paceline batch"),
    ],
)
def test_what_paddlenlps_commands_ask_for_and_is_not_there_is_one_short_sentence(
    text: str, said: str, hub: list[str]
) -> None:
    result = type_in(text)
    told = result.stderr.splitlines()[-1]
    assert (result.exit_code, hub) == (2, []) and said in told and len(told) < 130, result.output


def test_every_flag_of_paddlenlps_predictor_and_export_is_known() -> None:
    generate = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    own = {flag.removeprefix("--").replace("-", "_") for option in generate.params for flag in option.opts}
    assert set(PADDLE_FLAGS.split()) - own <= set(table.names(table.COMMAND_LINE))
