"""Names of parts: built in, entry points, dotted paths, files; and one line where a name leads nowhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from jgesr_lightning import names
from jgesr_lightning.aggregators import Aggregator
from jgesr_lightning.config.methods import part_settings

GOOD = "class Mine:\n    value = 3\n\ndef make():\n    return Mine()\n\nnumber = 5\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    def write(text=GOOD, name="mine.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def complaint(kind, name):
    with pytest.raises(ValueError, match=r"^\S+ is ") as caught:
        names.find(kind, name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", names.BUILTIN)
def test_our_own_parts_go_through_the_door(kind):
    for name in names.BUILTIN[kind]:
        assert callable(names.find(kind, name))
        assert names.check(kind, name) == name
        assert name in names.known(kind)


def test_methods_are_classes_of_their_names():
    for name in names.BUILTIN["aggregators"]:
        found = names.find("aggregators", name)
        assert issubclass(found, Aggregator) and found.name == name


def test_a_file_beside_the_configuration(file, tmp_path):
    path = file()
    for name in ("./mine.py:Mine", "mine.py:Mine", f"{path}:Mine", names.resolve("./mine.py:Mine", tmp_path)):
        assert names.find("models", name).value == 3
    assert names.find("models", "./mine.py:Mine") is names.find("models", f"{path}:Mine")  # one module, not two
    assert names.find("data", "./mine.py:make")().value == 3


def test_names_of_files_are_stored_in_full(file, tmp_path, monkeypatch):
    assert names.resolve("../a b/mine.py:Mine", "/home/me/configs") == "/home/me/a b/mine.py:Mine"
    assert names.resolve("./mine.py:Outer.Inner", "/x") == "/x/mine.py:Outer.Inner"
    assert names.resolve("mine.py:Mine") == f"{tmp_path}/mine.py:Mine"
    monkeypatch.setenv("HOME", "/home/me")
    assert names.resolve("~/mine.py:Mine", "/x") == "/home/me/mine.py:Mine"
    for name in ("fedavg", "package.module:Mine", "torchvision:resnet18", "mine.py", "a.pyc:Mine", ""):
        assert names.resolve(name, "/x") == name


def test_two_files_of_one_name_are_two_modules(file):
    file("value = 1\ndef make(): return value\n", "one/mine.py")
    file("value = 2\ndef make(): return value\n", "two/mine.py")
    assert [names.find("models", f"./{place}/mine.py:make")() for place in ("one", "two")] == [1, 2]


def test_a_file_may_import_what_stands_beside_it(file):
    file("factor = 7\n", "sub/beside.py")
    file("from beside import factor\ndef make(): return factor\n", "sub/mine.py")
    assert names.find("models", "./sub/mine.py:make")() == 7


def test_a_module_of_the_current_folder_or_installed(file):
    file(name="mypackage/__init__.py", text="")
    file(name="mypackage/parts.py")
    assert names.find("models", "mypackage.parts:Mine").value == 3
    assert names.find("models", "collections:OrderedDict") is __import__("collections").OrderedDict
    assert names.find("models", "os:path.join") is __import__("os").path.join


@pytest.fixture
def installed(file, tmp_path):
    def install(package, group, entry):
        file(f"[{group}]\n{entry}\n", f"site/{package}-1.0.dist-info/entry_points.txt")
        file(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", f"site/{package}-1.0.dist-info/METADATA")
        file(name=f"site/{package}.py")
        sys.path.insert(0, str(tmp_path / "site"))

    return install


def test_entry_points_of_installed_packages(installed):
    installed("theirs", "jgesr_lightning.models", "mynet = theirs:make\nlenet = theirs:Mine")
    assert names.find("models", "mynet")().value == 3
    assert names.find("models", "lenet").__module__.startswith("jgesr_lightning.models")  # ours stays ours
    assert "mynet" in names.known("models") and "mynet" not in names.known("data")
    assert "did you mean 'mynet'" in complaint("models", "mynett")
    assert "known: " in complaint("data", "mynet")


def test_a_name_that_two_packages_offer(installed):
    installed("theirs", "jgesr_lightning.models", "mynet = theirs:make")
    installed("others", "jgesr_lightning.models", "mynet = others:make")
    assert "both offer" in complaint("models", "mynet")


@pytest.mark.parametrize(
    ("text", "name", "about"),
    [
        (GOOD, "fedagv", "did you mean 'fedavg'"),
        (GOOD, "./nowhere.py:Mine", "there is no file "),
        (GOOD, "nowhere.module:Mine", "there is no module nowhere, installed or in this folder"),
        (GOOD, "os.nowhere:Mine", "there is no module os.nowhere"),
        (GOOD, "./mine.py:Mien", "mine.py holds no Mien (did you mean 'Mine'?)"),
        (GOOD, "./mine.py:Mine.nothing", "holds no Mine.nothing"),
        (GOOD, "./mine.py:number", "number is a int; it must be a class or a function"),
        (GOOD, "./mine.py", "say what in it: ./mine.py:Name"),
        (GOOD, "package.module.Mine", "a part of a module is written package.module:Mine"),
        (GOOD, "./mine.py:", "known: "),
        (GOOD, ":Mine", "known: "),
        (GOOD, "", "known: "),
        ("1 / 0\n", "./mine.py:Mine", "importing it failed: ZeroDivisionError: division by zero ("),
        ("x = 1\nimport nothing_such\n", "./mine.py:Mine", "importing it failed: ModuleNotFoundError: No module"),
        ("def f(:\n", "./mine.py:Mine", "importing it failed: SyntaxError: "),
        ("raise SystemExit(3)\n", "./mine.py:Mine", "importing it failed: SystemExit: 3"),
        ("raise KeyError('a\\nb')\n", "./mine.py:Mine", "importing it failed: KeyError"),
        ("open('/no/such')\n", "./mine.py:Mine", "importing it failed: FileNotFoundError"),
        ("raise Exception\n", "./mine.py:Mine", "importing it failed: Exception ("),
    ],
)
def test_names_that_lead_nowhere_are_one_line(file, text, name, about):
    file(text)
    message = complaint("aggregators", name)
    assert message.startswith(f"aggregator.name is {name!r}")
    assert about in message


def test_a_failed_import_names_the_line_and_is_tried_anew(file):
    path = file("x = 1\n\nimport nothing_such\n")
    assert f"({path}, line 3)" in complaint("models", "./mine.py:Mine")
    file()
    assert names.find("models", "./mine.py:Mine").value == 3


def test_an_edited_file_is_another_module(file):
    """As in a notebook, which would else go on with the former code under the new one's hash."""
    text = "def bursts(model, length: int = {0}):\n    return {0} * model\n"
    for factor in (2, 3, 2):
        name = file(text.format(factor), "links.py")
        assert names.find("channels", f"{name}:bursts")(1) == factor
        assert part_settings("channel", f"{name}:bursts") == {"length": factor}
    head = "from jgesr_lightning.aggregators import Aggregator\n\nclass Middle(Aggregator):\n"
    text = head + "    def __init__(self, pull: float = {0}): super().__init__()\n"
    for pull in (0.5, 0.25):
        name = file(text.format(pull), "methods.py")
        assert part_settings("aggregator", f"{name}:Middle") == {"pull": pull}


def test_code_is_known_by_its_syntax_tree(file, tmp_path):
    def code(name, **others):
        return names.code_of({"aggregator": {"name": name}, "model": {"name": "lenet"}, **others})

    path = file(GOOD, "of_mine.py")
    first = code(f"{path}:Mine")
    assert list(first) == ["aggregator.name"] == list(code("of_mine:Mine"))
    assert code("of_mine:Mine") == first == code("./of_mine.py:make")  # all of the file
    file("# said otherwise\n\n" + GOOD, "of_mine.py")
    assert code(f"{path}:Mine") == first
    file(GOOD + "\nmore = 1\n", "of_mine.py")
    assert code(f"{path}:Mine") != first
    assert code("fedavg") == code("fedavg", data={"partition": None}) == {}
    assert code("nowhere:Mine") == code("./nowhere.py:Mine") == {}  # nothing to compare
    file("def", "broken.py")
    assert code("./broken.py:Mine") == {}
    file("[[0], [1]]", "lists.json")
    one = code("fedavg", data={"partition": "lists.json"})
    file("[[1], [0]]", "lists.json")
    assert list(one) == ["data.partition"] and code("fedavg", data={"partition": "lists.json"}) != one


def test_short_words_for_folders_and_tables():
    for name in ("./mine.py:Mine", "/a b/mine.py:Mine", "package.module:Mine", "torchvision:Mine", "Mine"):
        assert names.label(name) == "Mine"


def test_names_need_no_torch():
    code = "import sys; from jgesr_lightning import names; names.known('models'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0
