"""``inferflow chat`` through a pipe, where every line is a turn; its commands, its file, and what fits."""

from __future__ import annotations

import io
import json
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferflow.cli.chat import Chat, interrupts
from inferflow.cli.conversation import Conversation, Turn, load, save
from inferflow.cli.lines import LeftError, message, state_dir
from inferflow.cli.main import main
from inferflow.errors import ArgumentError
from inferflow.llm import LLM
from inferflow.runtime.sampling_params import SamplingParams
from tests.cli.words import answers, chat_model, words_model

GUARD = 60.0  # seconds after which a process that does not end is given up


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat") / "words")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``inferflow chat -m MODEL ARGS`` with text piped in: status, stdout and stderr."""

    def call(text: str, *args: str, model: Path = model) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        with pytest.raises(SystemExit) as done:
            main(["chat", "-m", str(model), *args])
        seen = capsys.readouterr()
        assert "Traceback" not in seen.err
        return int(done.value.code or 0), seen.out, seen.err

    return call


def test_every_line_is_a_turn(run: Run, model: Path) -> None:
    status, out, err = run("w5 w6\n\nw7\n", "-n", "4", "--system", "w9")
    assert (status, err) == (0, "")
    assert out.splitlines() == answers(model, ["w5 w6", "w7"], "w9", max_tokens=4)


def test_messages_of_several_lines(run: Run, model: Path) -> None:
    text = 'w5 \\\nw6\\\nw7\n"""\nw8\n\nw9 \\\n"""\n"""w10"""\n'
    assert run(text, "-n", "3")[1].splitlines() == answers(model, ["w5 \nw6\nw7", "w8\n\nw9 \\", "w10"], max_tokens=3)


@pytest.mark.parametrize("text", ["w5 \\\n", '"""\nw5\n'])
def test_a_message_that_is_cut_off_is_refused(run: Run, text: str) -> None:
    status, out, err = run(text)
    assert (status, out) == (2, "")
    assert "it ends inside a message" in err


def test_commands(run: Run, model: Path) -> None:
    same = answers(model, ["w5"], max_tokens=4)[0]
    greedy = ["-n", "4"]
    assert run("w5\n/retry\n/undo\nw5\n/reset\nw5\n", *greedy)[1].splitlines() == [same] * 4
    with_system = answers(model, ["w5"], "w9 w10", max_tokens=4)[0]
    assert run("/system w9 w10\nw5\n/reset\nw5\n/system\n/undo\nw5\n/exit\nw5\n", *greedy)[1].splitlines() == [
        with_system, with_system, same,
    ]  # fmt: skip
    assert run("/help\n")[2].startswith("/help ")


def test_setting_options(run: Run, model: Path) -> None:
    sampled = answers(model, ["w5"], max_tokens=6, temperature=5.0, seed=3)[0]
    greedy = answers(model, ["w5"], max_tokens=6)[0]
    assert sampled != greedy
    script = "/set temperature 5\n/set seed 3\n/set max_tokens 6\nw5\n/undo\n/set temperature none\nw5\n/set\n"
    status, out, err = run(script)
    assert (status, out.splitlines()) == (0, [sampled, greedy])
    assert "temperature 0.0\n" in err
    assert "max-tokens 6\n" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/rest", "did you mean 'reset'?"),
        ("/usr/bin is a folder", "there is no such command"),
        ("/set temprature 1", "did you mean 'temperature'?"),
        ("/set temperature hot", "'hot' is not a valid float"),
        ("/set temperature -1", "/set temperature: it is -1"),
        ("/set kv f32", "there is no option 'kv'"),
        ("/undo", "nothing has been said"),
        ("/retry", "nothing has been said"),
        ("/save", "no file is named"),
        ("/load /no/such/file", "No such file"),
    ],
)
def test_refused_lines(run: Run, line: str, words: str) -> None:
    status, out, err = run(f"{line}\nw5\n")
    assert status in (1, 2)
    assert out == ""  # a pipe ends at the first error
    assert words in err


def test_saving_and_loading(run: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first, second = answers(model, ["w5", "w7"], "w9", max_tokens=4)
    assert run(f"w5\n/save {file}\n/save\n", "-n", "4", "--system", "w9")[0] == 0
    assert json.loads(file.read_text())["messages"] == [
        {"role": "system", "content": "w9"}, {"role": "user", "content": "w5"}, {"role": "assistant", "content": first},
    ]  # fmt: skip
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run(f"/load {file}\nw7\n", "-n", "4")[1].splitlines() == [second]
    status, _, err = run(f"w5\n/save {file}\n", "-n", "4")
    assert (status, "the file exists" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "no list of messages"),
        ('[{"role": "user"}]', "message 0 has no text"),
        ('[{"role": "user", "content": ["x"]}]', "message 0 has no text"),
        ('[{"role": "assistant", "content": "x"}]', "message 0 does not follow"),
        ('[{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]', "message 1 does not follow"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]', "message 1 does not follow"),
    ],
)
def test_files_that_hold_no_conversation(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(ArgumentError, match=words):
        load(tmp_path / "talk.json")


def test_a_conversation_survives_its_file(tmp_path: Path) -> None:
    talk = Conversation("be\n“brief”", [Turn("a", "b"), Turn("c", ""), Turn("d")])
    save(talk, tmp_path / "talk.json", replace=False)
    assert load(tmp_path / "talk.json") == talk


def test_what_no_longer_fits_is_left_out_and_told(run: Run, model: Path) -> None:
    users = [f"w{n} w{n + 1} w{n + 2}" for n in range(3, 33, 3)]
    status, out, err = run("\n".join(users) + "\n", "-n", "4", "--max-model-len", "40", "--system", "w59")
    assert status == 0
    assert len(out.splitlines()) == len(users)
    told = re.findall(r"the first (\w+) messages are left out", err)
    assert told == sorted(told, key=int) != []
    alone = run("w5\n", "-n", "40", "--max-model-len", "40")
    assert (alone[0], alone[1]) == (2, "")
    assert "do not fit in 40" in alone[2]


def test_the_turns_that_stay_are_the_last_with_the_system_message() -> None:
    talk = Conversation("s", [Turn(f"u{n}", f"a{n}") for n in range(9)] + [Turn("now")])
    encode = lambda messages: [ord(m["content"][0]) for m in messages for _ in range(10)]  # noqa: E731
    assert len(talk.fit(encode, 1000, 100)) == 200
    assert talk.left_out == 0
    assert len(talk.fit(encode, 150, 20)) == 60  # at most half, so that the next turns need not do it again
    assert talk.left_out == 7
    assert [m["content"] for m in talk.messages(talk.left_out)] == ["s", "u7", "a7", "u8", "a8", "now"]
    assert len(talk.messages()) == 20  # what is saved is all of it
    assert len(talk.fit(encode, 40, 20)) == 20
    assert [m["content"] for m in talk.messages(talk.left_out)] == ["s", "now"]
    with pytest.raises(ArgumentError, match="20 tokens and 21 for the answer"):
        talk.fit(encode, 40, 21)
    talk.undo()
    assert talk.left_out == 8


def test_a_turn_begins_with_the_turn_before(run: Run, smollm2_path: Path) -> None:
    text = (
        "Tell me about the capital of France, its river, its museums and its towers, in two or three short sentences."
    )
    status, out, err = run(f"{text}\nAnd of Italy?\n", "-n", "48", "--stats", model=smollm2_path)
    assert status == 0
    with LLM(smollm2_path) as llm:
        messages = [{"role": "user", "content": text}]
        first = llm.chat_ids(messages)
        answer = llm.chat(messages, max_tokens=48)
        assert out.startswith(answer.text)
        turn = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And of Italy?"}]
        second = llm.chat_ids([*messages, *turn])
        assert second[: len(first) + len(answer.ids)] == [*first, *answer.ids]
        size = llm.engine.block_size
    stats = re.findall(r"\[(\d+) \+ (\d+) tokens, (\d+) cached, first after [\d.]+ s, [\d.]+ tokens/s\]", err)
    assert [int(row[0]) for row in stats] == [len(first), len(second)]
    computed = len(first) + len(answer.ids) - 1  # nobody computed the last token
    assert [int(row[2]) for row in stats] == [0, computed // size * size]


def test_what_the_model_recommends(run: Run, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 5.0, "top_p": "all"}))
    status, out, err = run("w5\n", "-n", "6", "--seed", "3", model=folder)
    assert status == 0
    assert out.splitlines() == answers(model, ["w5"], max_tokens=6, temperature=5.0, seed=3)
    assert "warning: generation_config.json: top_p is 'all' and is left out" in err
    cold = run("w5\n", "-n", "6", "--temperature", "0", model=folder)[1]
    assert cold.splitlines() == answers(model, ["w5"], max_tokens=6)


def test_refusals(run: Run, tmp_path: Path) -> None:
    status, out, err = run("w5\n", model=words_model(tmp_path / "plain"))
    assert (status, out) == (1, "")
    assert "the model has no chat template (inferflow generate --raw" in err
    status, _, err = run("w5\n", "--temperature", "-1", model=Path("/no/such/model"))
    assert (status, "--temperature: it is -1" in err) == (2, True)


def test_control_c_ends_what_nobody_types(model: Path, plain_signals: None) -> None:
    command = [
        sys.executable,
        "-m",
        "inferflow.cli",
        "--no-config",
        "chat",
        "-m",
        str(model),
        "--max-model-len",
        "60000",
    ]
    with subprocess.Popen([*command, "--ignore-eos"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"w5\nw6\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # the answer has begun, and more could be typed
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(GUARD) == 130


def test_where_the_history_is() -> None:
    assert state_dir({"XDG_STATE_HOME": "/state"}, "linux") == Path("/state/inferflow")
    assert state_dir({}, "linux") == Path.home() / ".local" / "state" / "inferflow"


@pytest.mark.parametrize("words", [0, 1, 3])
def test_an_answer_is_stopped_at_the_end_of_a_step(model: Path, capsys: pytest.CaptureFixture[str], words: int) -> None:
    with LLM(model) as llm:
        lines: Any = Typed()
        talk = Chat(llm, SamplingParams(max_tokens=8), Conversation(), lines, stats=False)
        steps = 0

        def press(events: list[Any]) -> None:
            nonlocal steps
            steps += 1
            lines.asked = steps >= words

        llm.listeners.append(press)
        lines.asked = words == 0
        with interrupts(llm, lines):
            talk.say("w5")
            whole, told = answers(model, ["w5"], max_tokens=8)[0], capsys.readouterr()
            assert told.out.split() == whole.split()[: max(0, words - 1)]
            assert ("stopped before a word" in told.err) == (words < 2)
            assert (not llm.engine.running, not llm.engine.waiting, any(llm.engine.pool.references)) == (
                True,
                True,
                False,
            )
            llm.listeners.remove(press)
            lines.asked = False
            talk.take("/retry")
        assert capsys.readouterr().out == f"{whole}\n"
        assert talk.conversation.turns == [Turn("w5", whole)]


class Typed:
    """Lines as somebody types them; None is Ctrl-D."""

    interactive, reading, asked = True, False, False

    def __init__(self, *lines: str | None) -> None:
        self.lines = list(lines)

    def read(self, prompt: str) -> str:
        line = self.lines.pop(0)
        if line is None:
            raise LeftError
        return line


def test_leaving_in_the_midst_of_a_message() -> None:
    lines: Any = Typed("a \\", None)
    with pytest.raises(LeftError):
        message(lines)
