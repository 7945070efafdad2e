"""Globals of a module, made each thread's own."""

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainer.fx_globals import CannotHold, always, per_thread

SOURCE = """
from contextlib import contextmanager

count = 0
seen: dict = {"begin": 1}
other = 7
late = compute = None or other


def add(n=1):
    global count
    count += n
    return count


def shadowed(count):
    return [count for count in (count, 5)]


def local():
    count = 3
    return count


def mixed():
    count = 3

    def inner():
        global count
        count += 1
        return count

    return inner(), count


def deep():
    def inner():
        return lambda: (count, other)
    return inner()


@contextmanager
def counting():
    global count
    before = count
    try:
        yield lambda: count
    finally:
        count = before


class Thing:
    @property
    def count(self):
        return count

    @staticmethod
    def note(key, value):
        seen[key] = value
        return dict(seen)
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    yield from loaded(tmp_path, "torch.trainer_sample", SOURCE)


def loaded(folder: Path, name: str, source: str) -> Iterator[ModuleType]:
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


def elsewhere(work: Callable[[], Any]) -> Any:
    """What it returns in a thread of its own."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


def test_each_thread_has_its_own(module: Any) -> None:
    held = module.add  # as a function that was wrapped before holds it
    undo = per_thread(module, ("count", "seen"))
    assert [held(), held()] == [1, 2] and elsewhere(held) == 1
    assert module.count == 2 and elsewhere(lambda: module.count) == 0
    module.count = 40
    assert module.add(2) == 42 and elsewhere(module.add) == 1
    assert module.Thing().count == 42 and module.deep()() == (42, 7)
    assert elsewhere(lambda: module.Thing.note("a", 1)) == {"begin": 1, "a": 1}
    assert module.Thing.note("b", 2) == {"begin": 1, "b": 2}
    assert module.add is held
    undo()
    assert module.count == 0 and module.add() == 1 and module.seen == {"begin": 1}


def test_variables_of_the_same_name_are_left_alone(module: Any) -> None:
    before = module.shadowed.__code__, module.local.__code__, module.add.__code__
    undo = per_thread(module, ("count",))
    assert (module.shadowed.__code__, module.local.__code__) == before[:2] and module.add.__code__ != before[2]
    assert module.shadowed(4) == [4, 5] and module.local() == 3
    assert [module.mixed(), module.mixed(), elsewhere(module.mixed)] == [(1, 3), (2, 3), (1, 3)]
    undo()
    assert module.add.__code__ is before[2]


def test_what_is_inside_decorators_is_reached(module: Any) -> None:
    undo = per_thread(module, ("count",))
    with module.counting() as now:
        module.count = 9
        assert now() == 9 and elsewhere(lambda: module.count) == 0
    assert module.count == 0
    undo()


def test_lines_of_a_traceback_stay_right(module: Any) -> None:
    line = module.add.__code__.co_firstlineno
    undo = per_thread(module, ("count",))
    with pytest.raises(TypeError) as caught:
        module.add("x")
    entry = caught.traceback[-1]
    assert entry.lineno + 1 == line + 2 and str(entry.statement).strip() == "count += n"
    undo()


def test_a_copy_of_a_dict_by_import_is_reached(module: Any, tmp_path: Path) -> None:
    source = "from torch.trainer_sample import seen as known, count\n\n\ndef look():\n    return dict(known), count\n"
    for copy in loaded(tmp_path, "torch.trainer_copy", source):
        undo = per_thread(module, ("count", "seen"))
        module.Thing.note("mine", 1)
        assert copy.look() == ({"begin": 1, "mine": 1}, 0)
        assert elsewhere(copy.look) == ({"begin": 1}, 0)
        undo()
        assert copy.look() == ({"begin": 1}, 0)


@pytest.mark.parametrize(
    ("names", "why"), [(("count", "missing"), "has no global missing"), (("late",), "late does not begin as a plain")]
)
def test_what_can_not_be_held_is_refused_and_nothing_changed(module: Any, names: tuple[str, ...], why: str) -> None:
    before = dict(vars(module)), type(module), module.add.__code__
    with pytest.raises(CannotHold, match=why):
        per_thread(module, names)
    assert (dict(vars(module)), type(module), module.add.__code__) == before


def test_code_that_is_not_its_source_is_refused(module: Any) -> None:
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("count += n", "count -= n"))
    with pytest.raises(CannotHold, match="add is not what its source says"):
        per_thread(module, ("count",))
    assert module.add() == 1


def test_a_module_without_source_is_refused(module: Any) -> None:
    Path(module.__file__).unlink()
    with pytest.raises(CannotHold, match=r"the source of torch.trainer_sample can't be read"):
        per_thread(module, ("count",))


def test_a_function_can_be_made_to_give_one_answer(module: Any) -> None:
    held, code = module.local, module.local.__code__
    undo = always(module.local, False)
    assert held() is False
    undo()
    assert held() == 3 and held.__code__ is code
    always(module.local, True)
    assert held() is True
