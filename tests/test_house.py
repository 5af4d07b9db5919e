"""The house stays small enough to see: lines, guards, public names and the walks of two calls have limits."""

import pytest

import house


def test_lines() -> None:
    # the frame took 46,600 and the papers 19,960; language models, groups of processes, forecasts, influence, the live
    # page and the atlas came on top; then rows that an index picks, inputs as people hold them, and contests of
    # optimisers that train all settings together
    assert house.lines(house.SRC / "biascope") <= 58_050
    assert house.lines(house.SRC / "biascope_papers") <= 21_390


def test_no_file_holds_more_than_one_idea() -> None:
    files = [*house.SRC.rglob("*.py")]
    assert [f.name for f in files if len(f.read_text().splitlines()) > 450] == []


def test_public_names() -> None:
    assert sum(house.public_names().values()) <= 250


def test_guards_outside_the_door_and_support() -> None:
    files = [f for room in house.rooms() if room.name != "support" for f in room.rglob("*.py") if f.name != "door.py"]
    assert house.guard_share(files) <= 0.12


def test_walks() -> None:
    found = house.two_walks()
    limits = {"ntk": (12, 80), "ekfac": (18, 120)}
    for name, (files, functions) in limits.items():
        walked, entered = found[name]
        assert len(walked) <= files, sorted(walked)
        assert len(entered) <= functions


def test_no_module_is_shadowed_by_a_name_of_its_package() -> None:
    import importlib

    shadowed = []
    for room in house.rooms():
        if not (room / "__init__.py").exists():
            continue
        package = importlib.import_module(f"biascope.{room.name}")
        for file in room.glob("*.py"):
            if file.stem in getattr(package, "__all__", ()) and not hasattr(getattr(package, file.stem), "__path__"):
                value = getattr(package, file.stem)
                if type(value).__name__ != "module":
                    shadowed.append(f"{room.name}.{file.stem}")
    assert shadowed == []


def test_a_guard_is_counted(tmp_path: pytest.TempPathFactory) -> None:
    file = tmp_path / "f.py"  # type: ignore[operator]
    file.write_text("def f(x):\n    if x < 0:\n        raise ValueError(x)\n    y = 2 * x\n    return y\n")
    assert house.guards_and_code(file) == (2, 2)
