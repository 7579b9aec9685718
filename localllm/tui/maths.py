"""Simple TeX formulas as Unicode text. Knows no Markdown; what it cannot write is left to be shown as it stands."""

from __future__ import annotations

import re
from collections.abc import Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _pairs(text: str) -> Mapping[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


_SIGNS = _pairs(
    "alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ "
    "mu μ nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ "
    "Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω times × cdot · div ÷ pm ± mp ∓ ast ∗ circ ∘ bullet • oplus ⊕ "
    "otimes ⊗ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ ll ≪ gg ≫ approx ≈ sim ∼ simeq ≃ equiv ≡ cong ≅ propto ∝ infty ∞ "
    "sum ∑ prod ∏ int ∫ oint ∮ partial ∂ nabla ∇ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ "
    "cap ∩ setminus ∖ emptyset ∅ varnothing ∅ forall ∀ exists ∃ neg ¬ lnot ¬ land ∧ wedge ∧ lor ∨ vee ∨ to → "
    "rightarrow → leftarrow ← leftrightarrow ↔ mapsto ↦ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⇒ iff ⇔ "
    "therefore ∴ ldots … dots … cdots ⋯ vdots ⋮ prime ′ angle ∠ perp ⊥ parallel ∥ mid | vert | Vert ‖ lvert | rvert | "
    "lVert ‖ rVert ‖ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ hbar ℏ ell ℓ Re ℜ Im ℑ aleph ℵ degree °"
)
_NAMES = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim max min sup inf det dim ker gcd "
    "deg arg Pr mod bmod"
)
_SPACES: Mapping[str, str] = {"quad": " ", "qquad": " ", ",": " ", ":": " ", ";": " ", " ": " ", "!": ""}
_UNSEEN = _words("left right big Big bigl bigr Bigl Bigr displaystyle textstyle limits")
_UPRIGHT = _words("text textbf textit mathrm mathbf mathit mathsf mathcal operatorname boldsymbol")
_UPRIGHT_GROUP = re.compile(rf"\\(?:{'|'.join(sorted(_UPRIGHT))})\s*\{{[^{{}}]*\}}")
_DOUBLED = _pairs("R ℝ N ℕ Z ℤ Q ℚ C ℂ P ℙ H ℍ")
_MARKS: Mapping[str, str] = {"bar": "\u0304", "hat": "\u0302", "tilde": "\u0303", "dot": "\u0307", "vec": "\u20d7"}
_ROOTS: Mapping[str, str] = {"": "√", "2": "√", "3": "∛", "4": "∜"}
_FRACTIONS = _pairs("1/2 ½ 1/3 ⅓ 2/3 ⅔ 1/4 ¼ 3/4 ¾ 1/5 ⅕ 1/6 ⅙ 1/8 ⅛")
_RAISED = str.maketrans(
    "0123456789+-=()abcdefghijklmnoprstuvwxyzT∘′*",
    "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᵀ°′*",
)
_LOWERED = str.maketrans("0123456789+-=()aehijklmnoprstuvxβγρφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\s+|.", re.DOTALL)
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_SUM = re.compile(r"[^\w.!′'()|√∛∜]")  # what needs parentheses around it on a line
_ATOM = re.compile(r"[\d.]+|[^\W\d][⁰¹²³⁴-₟ᵢ-ᵪⱼ′]*|[√∛∜]\w|\(.*\)")  # what needs none below a fraction's line
_IN_PARENTHESES = re.compile(r"\([^()]*\)")
_PLAIN = re.compile(r"[A-Za-z0-9.,']{1,6}")
_SIGN = re.compile(r"[\\^_=<>+*/()|-]")
_MOST = 1000  # characters of a formula
_DEEPEST = 20


class _UnknownError(Exception):
    """This TeX has no simple form."""


def is_formula(source: str) -> bool:
    """Return whether the text between two dollars is meant as a formula: prices and shell variables are not."""
    return bool(_SIGN.search(source) or _PLAIN.fullmatch(source.strip()))


def in_unicode(source: str) -> str | None:
    """The formula as text; None where it has no simple form."""
    if len(source) > _MOST or _WORD.search(_UPRIGHT_GROUP.sub("", source)):
        return None
    try:
        return " ".join(_Formula(source).sequence(0).split())
    except _UnknownError:
        return None


class _Formula:
    """Reads a formula from the front."""

    def __init__(self, source: str) -> None:
        self._tokens = _TOKEN.findall(source)
        self._at = 0

    def sequence(self, depth: int, end: str = "") -> str:
        """The text up to the closing token. Raises _UnknownError."""
        if depth > _DEEPEST:
            raise _UnknownError
        parts: list[str] = []
        while self._at < len(self._tokens):
            if self._tokens[self._at] == end:
                self._at += 1
                return "".join(parts)
            parts.append(self._next(depth))
        if end:
            raise _UnknownError
        return "".join(parts)

    def _next(self, depth: int) -> str:
        token = self._tokens[self._at]
        self._at += 1
        if token.startswith("\\"):
            return self._command(token[1:], depth)
        if token == "^":
            return _script(self._argument(depth), _RAISED, "^")
        if token == "_":
            return _script(self._argument(depth), _LOWERED, "_")
        if token == "{":
            return self.sequence(depth + 1, "}")
        if token in "}&#%$":
            raise _UnknownError
        return " " if token.isspace() else token

    def _argument(self, depth: int) -> str:
        while self._at < len(self._tokens) and self._tokens[self._at].isspace():
            self._at += 1
        if self._at == len(self._tokens):
            raise _UnknownError
        return self._next(depth + 1).strip()

    def _command(self, name: str, depth: int) -> str:
        if (sign := _SIGNS.get(name, _SPACES.get(name))) is not None:
            return sign
        if name in _NAMES:
            return f"{name} " if self._at < len(self._tokens) and self._tokens[self._at].isalnum() else name
        if name in ("{", "}", "%", "$", "#", "&", "_", "|"):
            return "‖" if name == "|" else name
        if name in _UNSEEN:
            if self._tokens[self._at : self._at + 1] == ["."]:  # \left. stands for no bracket
                self._at += 1
            return ""
        if name in _UPRIGHT:
            return self._argument(depth)
        if name in ("frac", "dfrac", "tfrac"):
            over, under = self._argument(depth), self._argument(depth)
            return _FRACTIONS.get(f"{over}/{under}", f"{_grouped(over)}/{_divisor(under)}")
        if name == "sqrt":
            return self._root(depth)
        if name == "mathbb" and (letter := _DOUBLED.get(self._argument(depth))) is not None:
            return letter
        if name in _MARKS and len(under := self._argument(depth)) == 1:
            return under + _MARKS[name]
        raise _UnknownError

    def _root(self, depth: int) -> str:
        index = ""
        if self._tokens[self._at : self._at + 1] == ["["]:
            self._at += 1
            index = self.sequence(depth + 1, "]")
        if index not in _ROOTS:
            raise _UnknownError
        under = self._argument(depth)
        return _ROOTS[index] + (under if len(under) == 1 or under.isdecimal() else f"({under})")


def _grouped(text: str) -> str:
    return f"({text})" if _SUM.search(_IN_PARENTHESES.sub("", text)) else text


def _divisor(text: str) -> str:
    return text if _ATOM.fullmatch(text) else f"({text})"


def _script(text: str, table: Mapping[int, str | int | None], sign: str) -> str:
    """The text raised or lowered; behind its sign where a letter of it has no such form."""
    if all(ord(character) in table for character in text):
        return text.translate(dict(table))
    return f"{sign}{text}" if len(text) == 1 else f"{sign}({text})"
