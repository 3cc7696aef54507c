"""Ids say where they were born and no more."""

from nodeagent.claims import ids


def test_ids_have_their_form_and_their_nodes_hint() -> None:
    made = {ids.new_sandbox_id(ids.node_hint("node-1")) for _ in range(100)}
    assert len(made) == 100
    assert all(ids.ID_PATTERN.fullmatch(one) for one in made)
    assert {one[3:9] for one in made} == {ids.node_hint("node-1")}
    assert ids.node_hint("node-1") != ids.node_hint("node-2")


def test_tokens_are_stored_as_hashes_of_any_text() -> None:
    assert len(ids.new_token()) >= 43
    assert ids.token_sha256("a") != ids.token_sha256("b")
    assert len(ids.token_sha256("\udcff")) == 32
