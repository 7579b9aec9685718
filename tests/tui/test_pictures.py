"""Each screen as it was looked at: at three sizes, dark and light. `python -m tools.chat_screens` draws them anew."""

from __future__ import annotations

import json

import pytest

from tools.chat_screens import FOLDER, SCENES, SIZES, THEMES, VERSIONS, pictures, versions

pytestmark = [
    pytest.mark.usefixtures("home"),
    pytest.mark.skipif(
        json.loads(VERSIONS.read_text()) != versions(), reason=f"drawn by other versions than {VERSIONS.name} names"
    ),
]


@pytest.mark.parametrize("name", SCENES)
async def test_a_screen_is_drawn_as_in_its_picture(name: str) -> None:
    for file, svg in (await pictures(name)).items():
        assert (FOLDER / file).read_text(encoding="utf-8") == svg, f"look at it: python -m tools.chat_screens ({file})"


def test_there_are_no_pictures_but_those_that_are_drawn() -> None:
    drawn = {f"{name}-{size}-{tone}.svg" for name in SCENES for size in SIZES for tone in THEMES}
    assert {path.name for path in FOLDER.glob("*.svg")} == drawn
