"""Key schema and value header: what is written is read back, and nothing else is."""

from __future__ import annotations

import fnmatch

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot
from support.kv import key_of

from leyline_lmcache.connector.redis import KVKey, Outcome
from leyline_lmcache.connector.redis.codec import (
    MAGIC,
    PREAMBLE,
    Header,
    ValueFault,
    check_header,
    checksum,
    decode_header,
    encode_header,
    header_length,
    pack,
    template,
    unpack,
)
from leyline_lmcache.connector.redis.keys import KeySchema, digest

KEY = b"12345678"
names = st.text(max_size=40)
keys = st.builds(
    KVKey,
    model=names,
    chunk=st.binary(min_size=1, max_size=32),
    rank=st.integers(0, 2**32 - 1),
    group=st.integers(0, 100),
    salt=names,
)


@given(keys, st.text(max_size=10))
def test_a_key_reads_back(key: KVKey, identity: str) -> None:
    schema = KeySchema("leyline", identity)
    assert schema.parse_kv(schema.kv(key)) == key


@given(keys, keys)
def test_two_keys_never_share_a_name(one: KVKey, other: KVKey) -> None:
    schema = KeySchema("leyline")
    assert (schema.kv(one) == schema.kv(other)) == (one == other)


@given(keys)
def test_every_key_carries_prefix_and_schema_version(key: KVKey) -> None:
    schema = KeySchema("a.b-c_d", "rev")
    assert schema.kv(key).startswith(b"a.b-c_d:1:kv:")
    assert schema.meta("f", "k", "n").startswith(b"a.b-c_d:1:meta:")


@given(names.filter(bool), st.text(min_size=1), st.text(min_size=1), names.filter(bool))
def test_records_of_a_family_share_a_slot(family: str, kind: str, name: str, other: str) -> None:
    schema = KeySchema("leyline")
    slots = {key_slot(schema.meta(family, kind, name)), key_slot(schema.meta(family, name, kind))}
    assert len(slots) == 1
    assert schema.parse_meta(schema.meta(family, kind, name)) == (family, kind, name)
    assert key_slot(schema.meta_pattern(family)) in slots


def test_blocks_spread_over_slots_whatever_the_salt() -> None:
    schema = KeySchema("leyline")
    slots = {key_slot(schema.kv(key_of(i, model="a{b}c", salt="{x}"))) for i in range(64)}
    assert len(slots) > 50


@given(keys, names)
def test_pattern_matches_exactly_the_model(key: KVKey, model: str) -> None:
    schema = KeySchema("leyline")
    raw = schema.kv(key).decode()
    assert fnmatch.fnmatchcase(raw, schema.kv_pattern().decode())
    assert fnmatch.fnmatchcase(raw, schema.kv_pattern(model).decode()) == (model == key.model)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"leyline:2:kv:m::0:0::aa",
        b"other:1:kv:m::0:0::aa",
        b"leyline:1:kv:m::0:0:aa",
        b"leyline:1:kv:m::0:0::AA",
        b"leyline:1:kv:m::+0:0::aa",
        b"leyline:1:kv:%6D::0:0::aa",
        b"leyline:1:kv:m::0:0:%FF:aa",
        b"leyline:1:kv:m:rev:0:0::aa",
        b"leyline:1:kv:m::0:0::xyz",
    ],
)
def test_other_keys_are_not_ours(raw: bytes) -> None:
    assert KeySchema("leyline").parse_kv(raw) is None


def test_repr_keeps_the_salt_to_itself() -> None:
    assert "tenant" not in repr(key_of(1, salt="tenant"))


@given(st.integers(0, 2**40), st.binary(min_size=8, max_size=8), st.text(max_size=60))
def test_a_header_reads_back(length: int, summed: bytes, model: str) -> None:
    header = Header(length, summed, KEY, model)
    raw = encode_header(header)
    size = header_length(raw[: PREAMBLE.size])
    assert size == len(raw) - PREAMBLE.size
    assert decode_header(raw[PREAMBLE.size :]) == header
    made = template(length, model)
    assert made.size == len(raw) and made.match(raw, KEY) == summed
    assert made.match(raw, b"87654321") is None


def test_the_header_is_msgpack_that_others_can_read() -> None:
    raw = encode_header(Header(5, b"checksum", KEY, "org/model"))
    assert raw[: len(MAGIC)] == b"LEY\x01"
    fields = msgpack.unpackb(raw[PREAMBLE.size :])
    assert fields == {"n": 5, "c": b"checksum", "k": KEY, "m": "org/model"}


def packed(**changes: object) -> bytes:
    fields: dict[str, object] = {"n": 5, "c": b"checksum", "k": KEY, "m": "m"}
    fields.update(changes)
    return msgpack.packb({name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (msgpack.packb([1]), "expected a map, got list"),
        (packed(n=None), "n: expected int"),
        (packed(n="5"), "n: expected int"),
        (packed(n=True), "n: expected int"),
        (packed(n=-1), "n: expected a length"),
        (packed(c=7), "c: expected bytes"),
        (packed(c=b"short"), "c: expected 8 bytes, got 5"),
        (packed(k=b"short"), "k: expected 8 bytes, got 5"),
        (packed(m=b"m"), "m: expected str"),
        (packed(x=1), "expected the fields n, c, k, m"),
    ],
)
def test_a_damaged_header_names_the_field(raw: bytes, named: str) -> None:
    with pytest.raises(ValueFault, match=named) as fault:
        decode_header(raw)
    assert fault.value.outcome is Outcome.CORRUPT


@pytest.mark.parametrize(
    ("preamble", "named"),
    [
        (b"LEY", "expected 6 bytes, got 3"),
        (b"ABCDEF", "no Leyline value"),
        (b"LEY\x02\x00\x10", "v: expected schema version 1, got 2"),
        (b"LEY\x01\xff\xff", "at most"),
    ],
)
def test_a_foreign_value_is_told_by_its_first_bytes(preamble: bytes, named: str) -> None:
    with pytest.raises(ValueFault, match=named) as fault:
        header_length(preamble)
    assert fault.value.outcome is Outcome.FOREIGN


@given(st.binary(max_size=300))
def test_any_bytes_give_a_fault_or_a_header(raw: bytes) -> None:
    try:
        assert isinstance(decode_header(raw), Header)
    except ValueFault as fault:
        assert fault.detail


def test_another_key_or_model_is_foreign() -> None:
    header = Header(5, b"checksum", KEY, "m")
    check_header(header, KEY, "m")
    for key, model in ((b"87654321", "m"), (KEY, "n")):
        with pytest.raises(ValueFault) as fault:
            check_header(header, key, model)
        assert fault.value.outcome is Outcome.FOREIGN


@given(st.binary(max_size=200), st.data())
def test_small_values_survive_no_change_of_a_byte(payload: bytes, data: st.DataObject) -> None:
    raw = pack(payload, KEY, "m")
    assert unpack(raw, KEY, "m") == payload
    place = data.draw(st.integers(0, len(raw) - 1))
    changed = bytearray(raw)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueFault):
        unpack(bytes(changed), KEY, "m")
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(ValueFault):
        unpack(raw[:cut], KEY, "m")


def test_checksum_sees_every_bit() -> None:
    data = bytearray(4096)
    plain = checksum(memoryview(data))
    for bit in range(0, 8 * len(data), 1021):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(memoryview(data)) != plain
        data[bit // 8] ^= 1 << bit % 8


def test_a_name_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="model: at most"):
        template(1, "m" * 1000)


def test_digest_is_the_same_in_every_process() -> None:
    assert digest(b"leyline:1:kv:m::0:0::aa").hex() == "e169edd28f61bf92"
