"""Files of other systems: which system they are of, what is read of YAML, TOML and command lines,
and that whatever cannot be used ends in one sentence.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.recipes import recipes
from async_grpo.errors import SetupError
from async_grpo.tools.migrate.command import migrate
from async_grpo.tools.migrate.command_lines import command_line_of
from async_grpo.tools.migrate.source import resolve_all
from tests.support import verbs
from tests.support.verbs import train

FILES = Path(__file__).parent / "files"
NAMES = sorted(path.name for path in FILES.iterdir())


# ---- which system


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_recognised(name: str) -> None:
    peer = migrate(FILES / name).peer
    assert name.startswith(peer.option.replace("-", "_"))


def test_an_actor_of_verl_at_the_top_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "their.yaml").write_text("actor: {clip_ratio: 0.2, use_kl_loss: false}\n")
    assert migrate(tmp_path / "their.yaml").peer.name == "verl"


@pytest.mark.parametrize("kind", ["kl", "k1"])
def test_a_loss_of_verl_that_holds_to_nothing_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "their.yaml"
    actor = "actor: {clip_ratio: 0.2, kl_loss_type: %s, use_kl_loss: %s}\n"
    path.write_text(actor % (kind, "true"))
    with pytest.raises(SetupError, match=rf"kl_loss_type {kind} does not depend on the reference"):
        migrate(path)
    for harmless in (actor % (kind, "false"), actor % (f"{kind}+", "true")):
        path.write_text(harmless)
        assert migrate(path).peer.name == "verl"


@pytest.mark.parametrize("recipe", recipes().values(), ids=lambda path: path.stem)
def test_our_own_files_are_of_nobody_else(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="has sections of async_grpo"):
        migrate(recipe)
    misspelt = tmp_path / "their.yaml"
    misspelt.write_text(recipe.read_text() + "\nlerner: {lr: 1e-6}\n")
    with pytest.raises(SetupError, match="is not recognised"):
        migrate(misspelt)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: {c: 2}\n", "is not recognised as a configuration of verl, ROLL, AReaL"),
        ("num_generations: 8\n", "is not recognised"),
        ("run: {total_steps: 3}\nmodel: {warm_start: {}}\n", "has sections of async_grpo"),
        ("", "is empty"),
        ("# only a comment\n", "holds no keys"),
        ("- 1\n- 2\n", "holds no keys"),
        ("just a text\n", "holds no keys"),
        ("a: &a {b: *a}\n", "recursive"),
        ("a: [1\n", "not valid YAML"),
        ("a: 1\na: 2\n", "given twice"),
        ("1: 2\n", "is not text"),
        ("a: !!python/object/apply:os.getcwd []\n", "tag"),
        ("[" * 5000, "nested too deeply"),
        ("a: " + "9" * 5000, "a number in it"),
        ("".join(f"k{i}: 1\n" for i in range(6000)), "more than 5,000 keys"),
        ("x: " + "y" * 2**20, "bytes, which is no configuration"),
        ("a: \x01\n", "characters"),
        ("\0\0\0", "is not text"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "their.yaml").write_text(text)
    assert refused([str(tmp_path / "their.yaml")], capsys).find(told) > 0


def test_a_run_of_their_file_is_told_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = tmp_path / "ours.yaml"
    ours.write_text("run: {total_steps: 2, nam: x}\nmodel: {warm_start: {}}\n")
    for path, name in ((FILES / "verl_grpo.yaml", "verl"), (FILES / "prime_rl.toml", "prime-rl")):
        assert train([str(path)]) == 2
        told = capsys.readouterr()
        said = f"(The file is of {name}: async-grpo migrate {path} writes it"
        assert said in told.out + told.err
    assert train([str(ours)]) == 2
    told = capsys.readouterr()
    assert "`run.nam` is not a setting" in told.out + told.err
    assert "migrate" not in told.out + told.err


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says when it refuses: one line."""
    assert verbs.migrate(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 600
    return err


def test_paths_that_cannot_be_used_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary, bomb, toml = tmp_path / "b.yaml", tmp_path / "bomb.yaml", tmp_path / "t.toml"
    binary.write_bytes(random.Random(0).randbytes(5000))
    lines = (f"a{i + 1}: &a{i + 1} {{p: *a{i}, q: *a{i}}}\n" for i in range(60))
    bomb.write_text("a0: &a0 {x: 1}\n" + "".join(lines))
    toml.write_text("a = \n")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    good = str(FILES / "prime_rl.toml")
    for arguments, told in (
        ([str(tmp_path)], "is a directory"),
        ([str(tmp_path / "no.yaml")], "No such file"),
        ([str(tmp_path / ("x" * 300))], "too long"),
        (["a\0b"], "cannot be read"),
        ([str(binary)], "cannot be read"),
        ([str(bomb)], "more than 100,000 values"),
        ([str(toml)], "not valid TOML"),
        ([str(fifo)], "no regular file"),
        ([good, "-o", str(tmp_path)], "cannot be written"),
        ([good, "-o", str(tmp_path / "no" / "out.yaml")], "cannot be written"),
        ([good, "-o", good], "is the file itself"),
    ):
        assert told in refused(arguments, capsys), arguments


# ---- references and command lines


def test_references_are_replaced_where_the_file_holds_them() -> None:
    values, left = resolve_all(
        {
            "a.n": 8,
            "a.copy": "${a.n}",
            "a.beside": "${.n}",
            "b.c.above": "${..x}",
            "b.x": "${a.copy}",
            "text": "${a.n} of ${b.x}",
            "list": ["${a.n}", 1],
            "env": "${oc.env:NO_SUCH_VARIABLE,16}",
            "selected": "${oc.select:a.n,3}",
            "not_selected": "${oc.select:gone,3}",
            "nested": "${oc.select:gone,${a.n}}",
            "decoded": "${oc.decode:1e-3}",
            "home": "${oc.env:HOME}",
            "round": "${trip}",
            "trip": "${round}",
            "nowhere": "x/${no.such}",
            "missing": "???",
        }
    )
    assert values["a.copy"] == values["a.beside"] == values["b.c.above"] == 8
    assert values["text"] == "8 of 8" and values["list"] == [8, 1]
    assert (values["env"], values["selected"], values["not_selected"]) == (16, 8, 3)
    assert (values["nested"], values["decoded"]) == (8, 1e-3)
    assert left == {"home", "round", "trip", "nowhere", "missing"}


def test_a_reference_that_grows_without_end_is_left() -> None:
    given = {f"k{i}": f"${{k{i + 1}}}${{k{i + 1}}}" for i in range(60)} | {"k60": "xx"}
    values, left = resolve_all(given)
    assert "k0" in left and max(map(len, values.values())) < 25_000


@pytest.mark.parametrize(
    ("script", "program", "options"),
    [
        ("python -m openrlhf.cli.x --a 1 --b --c 2 3 --d=x", "openrlhf.cli.x",
         [("a", 1), ("b", True), ("c", [2, 3]), ("d", "x")]),
        ("openrlhf.cli.x --lr -1e-6 --s 'a b' \\\n  --t \"c d\" > log --u 1", "openrlhf.cli.x",
         [("lr", -1e-6), ("s", "a b"), ("t", "c d"), ("u", 1)]),
        ("N=3\nM=$((N * 2**1 + 1))\nK=$((N * 2 + 1))\npython -m verl.main x.n=$N x.k=${K} x.m=$M",
         "verl.main", [("x.n", 3), ("x.k", 7), ("x.m", "${3 * 2**1 + 1}")]),
        ("A=${A:-4} # why\nexport B=\"${A}/$C\"\nverl.main a=$A b=$B '+c=${d.e}' \"d=['x','y']\"",
         "verl.main", [("a", 4), ("b", "4/${C}"), ("c", "${d.e}"), ("d", ["x", "y"])]),
        ("# --x 1\nls --all; ray job submit --addr y -- python3 -m verl.main a=1 | tee --append z",
         "verl.main", [("a", 1)]),
        ("verl.main a=$(date +%s) b=`date` c=$1 d=$((4else)) e=$((8 / (1 + 3)))", "verl.main",
         [("a", "${date +%s}"), ("b", "${date}"), ("c", "${1}"), ("d", "${4else}"), ("e", 2)]),
    ],
)  # fmt: skip
def test_command_lines_are_read(script: str, program: str, options: list[Any]) -> None:
    line = command_line_of(script)
    assert (line.program, line.options, line.left) == (program, options, [])


LEFT = "what this word means there is not known"
OTHER = "it has no more options than the one that is read; give it a separate file"
TAKEN = "set under a condition, which is taken to hold"


@pytest.mark.parametrize(
    ("script", "options", "left"),
    [
        ("DATA=(x.a=64  # why\n  'x.b=c d')\nDATA+=(x.e=1)\nverl.main x.n=8 \"${DATA[@]}\"",
         [("x.n", 8), ("x.a", 64), ("x.b", "c d"), ("x.e", 1)], []),
        ("declare -a A=(x.a=1 x.b=2)\nverl.main ${A[@]} x.c=${A[0]} \"x.d=${A[7]}\" x.f=${B[@]}",
         [("x.a", 1), ("x.b", 2), ("x.c", "x.a=1"), ("x.d", None), ("x.f", "${B[@]}")], []),
        ("ARGS='x.a=1'\nARGS+=\" x.b=2\"\nNONE=\nverl.main $NONE $ARGS \"x.s=$ARGS\"",
         [("x.a", 1), ("x.b", 2), ("x.s", "x.a=1 x.b=2")], []),
        ("E='--kl --coef 0.001'\nF=$E\nopenrlhf.cli.x --n 8 $F\\\n --m $(date +%s)",
         [("n", 8), ("kl", True), ("coef", 0.001), ("m", "${date +%s}")], []),
        ("accelerate launch --config_file a.yaml --num_processes 8 train_grpo.py --n 8 --r f.py",
         [("num_processes", 8), ("n", 8), ("r", "f.py")],
         [("config_file", "a.yaml", "an option of what launches the program")]),
        ("X=1 torchrun --nproc-per-node=4 -m verl.main x.a=1", [("nproc_per_node", 4), ("x.a", 1)],
         []),
        ("git clone a/verl --d; verl.first x.a=1; verl.second x.b=2 x.c=3; verl.third --dry-run",
         [("x.b", 2), ("x.c", 3)],
         [("another command", "verl.first", OTHER), ("another command", "verl.third", OTHER)]),
        ("verl.main --max-steps 3", [("max_steps", 3)], []),
        ("eval \"python3 -m verl.main x.a=1\"; bash -lc 'verl.main x.a=1 x.b=2' > log.txt 2>&1",
         [("x.a", 1), ("x.b", 2)], [("another command", "verl.main", OTHER)]),
        ("if [ $1 ]; then N=4; else\n N=8\nfi\nverl.main x.n=$N", [("x.n", 8)],
         [("N", "8", f"{TAKEN}; of 4, 8, the last is taken")]),
        ("A=(x.a=1)\nB=2\n[ $1 ] && A+=(x.b=$B)\nif x; then O=3; fi\nverl.main ${A[@]} x.c=1",
         [("x.a", 1), ("x.b", 2), ("x.c", 1)],
         [("A", "x.a=1 x.b=2", f"{TAKEN}; of x.a=1, x.a=1 x.b=2, the last is taken")]),
        ("M=m\nwhile x; do\n case $1 in\n --m)\n  M=$2\n  N=$2\n esac\ndone\n"
         "verl.main x.m=$M x.n=${N:-7}", [("x.m", "m"), ("x.n", 7)], []),
        ("openrlhf.cli.x --n 8 --name run \"$@\"", [("n", 8), ("name", "run")],
         [("next to the options", "${@}", LEFT)]),
        ("verl.main one x.a=1 two \"$@\" -v --b > log.txt", [("x.a", 1), ("b", True)],
         [("next to the options", word, LEFT) for word in ("one", "two", "${@}", "-v")]),
        ("verl.main x.a=1 x.s.b=2 x.s.c=3 ~x.s ~x.a=1 ~x.d x.s.b=4 --p ~user",
         [("x.s.b", 4), ("p", "~user")],
         [("x.a", 1, "deleted further on, by ~x.a=1"),
          ("x.s.b", 2, "deleted further on, by ~x.s"), ("x.s.c", 3, "deleted further on, by ~x.s"),
          ("x.s", "~x.s", "deleted there, so it counts as not given"),
          ("x.a", "~x.a=1", "deleted there, so it counts as not given"),
          ("x.d", "~x.d", "deleted there, so it counts as not given")]),
    ],
)  # fmt: skip
def test_every_word_of_a_command_is_an_option_or_left_with_a_reason(
    script: str, options: list[Any], left: list[Any]
) -> None:
    line = command_line_of(script)
    assert (line.options, line.left) == (options, left)


def test_what_a_script_says_apart_from_its_command_is_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "DATA=(data.train_batch_size=64 data.max_response_length=4096)\n"
        'python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8 "${DATA[@]}" '
        "~trainer.save_freq=5 surplus\n"
    )
    assert verbs.migrate([str(script)]) == 0
    out, err = capsys.readouterr()
    assert "rollout_batch_size: 64  # data.train_batch_size" in out
    assert "response_length: 4096  # data.max_response_length" in out
    assert "\n  every_steps" not in out and '"~trainer.save_freq=5" -- deleted there' in out
    assert 'next to the options: "surplus" -- what this word' in out
    assert err.startswith("verl: 3 keys taken over, 2 not")


@pytest.mark.parametrize(
    "script",
    [
        "x=10\n" + "x=$((x*x))\n" * 60 + "verl.main a=$x",
        "x=ab\n" + "x=$x$x\n" * 60 + "verl.main a=$x$x$x",
        "verl.main a=" + "$((" * 20_000,
        "verl.main a=" + "${" * 20_000,
        "verl.main a='" + '"' * 20_001,
        "x='" + "a " * 9_000 + "'\n" + "verl.main $x;" * 5_000,
        "x=(a b)\n" + 'x+=(${x[@]} "${x[@]}")\n' * 2_000 + "verl.main a=${x[*]}",
        "x=(a b)\n" + 'eval "verl.main a=${x[*]}"; x+=b\n' * 5_000,
        "verl.main " + "a=$b " * 9_000,
        ("verl.main " * 9_999 + "\n") * 5,
        ("verl.main " + "a.b=1 " * 4_000 + "~c " * 4_000 + "\n") * 5,
        "x=" + "a=$b x+=$x " * 20_000,
    ],
)
def test_hostile_scripts_are_read_in_no_time(script: str) -> None:
    line = command_line_of(script)
    assert line.program in ("verl.main", "") and len(str(line)) < 3_000_000
