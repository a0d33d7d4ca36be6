"""Two state machines that make sure of each other, without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.peers import handshake, wire
from penstock.engine.peers.wire import Decoder, Frame, WireError

RUN, SECRET = b"r" * 16, b"k" * 32


def an_asker(**changes: object) -> handshake.ClientHandshake:
    options: dict[str, object] = {
        "name": "b",
        "run_id": RUN,
        "secret": SECRET,
        "nonce": b"n" * 32,
    }
    return handshake.ClientHandshake(**{**options, **changes})  # type: ignore[arg-type]


def a_server(**secrets: bytes) -> handshake.ServerHandshake:
    known = {RUN: secrets.get("secret", SECRET)}
    return handshake.ServerHandshake(name="a", secrets=known.get, nonce=b"m" * 32)


def frame_in(data: bytes) -> Frame:
    decoder = Decoder(frozenset(wire.BODY_BYTES_MAX))
    decoder.feed(data)
    frame = decoder.next()
    assert frame is not None
    return frame


def test_both_sides_are_sure_after_four_frames() -> None:
    asker, server = an_asker(), a_server()
    challenge = server.on(frame_in(asker.opening))
    assert not server.is_done
    assert not asker.is_done
    proof = asker.on(frame_in(challenge))
    assert asker.peer == "a"
    welcome = server.on(frame_in(proof))
    assert server.is_done
    assert (server.peer, server.run_id) == ("b", RUN)
    assert asker.on(frame_in(welcome)) == b""
    assert asker.is_done


def test_the_secret_is_never_said() -> None:
    asker, server = an_asker(), a_server()
    challenge = server.on(frame_in(asker.opening))
    said = asker.opening + challenge + asker.on(frame_in(challenge))
    assert SECRET not in said


def test_an_asker_notices_a_server_with_another_secret() -> None:
    challenge = a_server(secret=b"x" * 32).on(frame_in(an_asker().opening))
    asker = an_asker()
    with pytest.raises(handshake.RefusedError, match="does not fit our secret"):
        asker.on(frame_in(challenge))
    assert not asker.is_done


def test_a_server_notices_an_asker_with_another_secret() -> None:
    server, liar = a_server(), an_asker(secret=b"x" * 32)
    challenge = frame_in(server.on(frame_in(liar.opening)))
    said, proof = challenge.body[: -handshake.PROOF_BYTES], challenge.body[-handshake.PROOF_BYTES :]
    opening = frame_in(liar.opening).body
    forged = handshake.proof_of(b"x" * 32, b"asker", opening, said, proof)
    with pytest.raises(handshake.RefusedError, match="another secret") as caught:
        server.on(Frame(wire.PROOF, 0, forged))
    assert caught.value.code == handshake.SAID_PROOF
    assert not server.is_done


def test_the_servers_proof_cannot_be_sent_back_as_the_askers() -> None:
    server = a_server()
    challenge = frame_in(server.on(frame_in(an_asker().opening)))
    with pytest.raises(handshake.RefusedError):
        server.on(Frame(wire.PROOF, 0, challenge.body[-handshake.PROOF_BYTES :]))


def test_a_proof_of_another_moment_does_not_fit() -> None:
    asker, server = an_asker(), a_server()
    proof = asker.on(frame_in(server.on(frame_in(asker.opening))))
    later = handshake.ServerHandshake(name="a", secrets={RUN: SECRET}.get, nonce=b"l" * 32)
    later.on(frame_in(asker.opening))
    with pytest.raises(handshake.RefusedError):
        later.on(frame_in(proof))


def test_an_unknown_run_is_refused_with_a_reason() -> None:
    with pytest.raises(handshake.RefusedError) as caught:
        a_server().on(frame_in(an_asker(run_id=b"q" * 16).opening))
    assert caught.value.code == handshake.SAID_RUN
    with pytest.raises(handshake.RefusedError, match="does not know our run"):
        an_asker().on(frame_in(handshake.refusal(caught.value.code)))


def test_another_protocol_is_refused_with_a_reason() -> None:
    opening = bytearray(an_asker().opening)
    opening[wire.HEAD.size + 8] += 1
    with pytest.raises(handshake.RefusedError) as caught:
        a_server().on(frame_in(bytes(opening)))
    assert caught.value.code == handshake.SAID_VERSION


def test_a_proof_before_a_hello_and_a_welcome_before_a_challenge_are_nonsense() -> None:
    with pytest.raises(WireError):
        a_server().on(Frame(wire.PROOF, 0, b"x" * 32))
    with pytest.raises(WireError):
        an_asker().on(Frame(wire.WELCOME, 0, b""))


@given(
    place=st.integers(0, 10_000),
    value=st.integers(1, 255),
    which=st.sampled_from(["opening", "challenge", "proof"]),
)
def test_one_changed_byte_anywhere_keeps_both_apart(place: int, value: int, which: str) -> None:
    """Somebody in between cannot change a name, a run, a nonce or a proof."""

    def passed_on(data: bytes, name: str) -> Frame:
        frame = frame_in(data)
        if name != which:
            return frame
        body = bytearray(frame.body)
        body[place % len(body)] ^= value
        return Frame(frame.kind, 0, bytes(body))

    asker, server = an_asker(), a_server()
    with pytest.raises((WireError, handshake.RefusedError)):
        challenge = server.on(passed_on(asker.opening, "opening"))
        proof = asker.on(passed_on(challenge, "challenge"))
        server.on(passed_on(proof, "proof"))
    assert not server.is_done
    assert not asker.is_done


@given(body=st.binary(max_size=256), kind=st.sampled_from([wire.HELLO, wire.PROOF]))
def test_anything_said_to_a_server_is_refused(body: bytes, kind: int) -> None:
    with pytest.raises((WireError, handshake.RefusedError)):
        a_server().on(Frame(kind, 0, body))
