"""The pod's protocol without I/O: what a packet asks for, and which hostnames are a pod's own."""

from __future__ import annotations

import typing

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from afxdpd import (
    ConfigBusyPoll,
    Connect,
    Fin,
    GetVersion,
    GetXskMap,
    Malformed,
    Request,
    hostname_matches,
    parse_request,
)

# -- Packets -----------------------------------------------------------------------------------------------------------

GRANTED = [
    (b"/connect,pod-x", Connect("pod-x")),
    (b"/connect, pod-x", Connect("pod-x")),
    (b"/version", GetVersion()),
    (b"/xsk_map_fd,veth100", GetXskMap("veth100")),
    (b"/xsk_map_fd, veth100", GetXskMap("veth100")),
    (b"/config_busy_poll,20,64", ConfigBusyPoll(timeout_us=20, budget=64)),
    (b"/config_busy_poll, 20, 64", ConfigBusyPoll(timeout_us=20, budget=64)),
    (b"/config_busy_poll,20, 64", ConfigBusyPoll(timeout_us=20, budget=64)),
    (b"/fin", Fin()),
]
"""Every request of the protocol, with a space after the comma and without."""


@pytest.mark.parametrize(("packet", "request_"), GRANTED)
def test_request_is_understood_when_connected(packet: bytes, request_: Request) -> None:
    """Each request of the protocol is what it says, with or without a space after each comma."""
    assert parse_request(packet, connected=True) == request_


@pytest.mark.parametrize(("packet", "request_"), GRANTED)
def test_request_is_refused_when_connect_has_not_come_first(packet: bytes, request_: Request) -> None:
    """Before /connect has been answered with /host_ok nothing but /connect is granted."""
    if isinstance(request_, Connect):
        assert parse_request(packet, connected=False) == request_
    else:
        assert parse_request(packet, connected=False) == Malformed("/connect has to come first")


@pytest.mark.parametrize(
    ("packet", "request_"),
    [
        (b"/connect,a.b-c", Connect("a.b-c")),
        (b"/connect,  x", Connect(" x")),
        (b"/connect,x ", Connect("x ")),
        (b"/connect," + b"x" * 253, Connect("x" * 253)),
        (b"/xsk_map_fd,..", GetXskMap("..")),
        (b"/xsk_map_fd,/etc", GetXskMap("/etc")),
        (b"/config_busy_poll,0,0", ConfigBusyPoll(0, 0)),
        (b"/config_busy_poll,-1,-1", ConfigBusyPoll(-1, -1)),
        (b"/config_busy_poll,0020,064", ConfigBusyPoll(20, 64)),
        (b"/config_busy_poll,999999999,-999999999", ConfigBusyPoll(999_999_999, -999_999_999)),
    ],
)
def test_fields_are_passed_on_when_they_are_unusual(packet: bytes, request_: Request) -> None:
    """What a field means is not the parser's business: whoever grants the request looks at it."""
    assert parse_request(packet, connected=True) == request_


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b" ",
        b",",
        b"connect,pod-x",
        b"/Connect,pod-x",
        b"/CONNECT,pod-x",
        b"//connect,pod-x",
        b"/connect",
        b"/connect ",
        b"/connect pod-x",
        b"/connect;pod-x",
        b"/connect,",
        b"/connect, ",
        b"/connect,pod-x,",
        b"/connect,pod-x,pod-y",
        b"/connect,,pod-x",
        b"/connect,pod\nx",
        b"/connect,pod-x\n",
        b"/connect,pod-x\0",
        b"/connect,pod\x1b[2J",
        b"/connect,pod\x7f",
        b"/connect,p\xc3\xb6d",
        b"/connect,\xff",
        b"/version,",
        b"/version, ",
        b"/version,0.1",
        b"/version\n",
        b"/version\0",
        b"/versions",
        b"/xsk_map_fd",
        b"/xsk_map_fd,",
        b"/xsk_map_fd, ",
        b"/xsk_map_fd,veth0,veth1",
        b"/xsk_map_fd\0,veth0",
        b"/config_busy_poll",
        b"/config_busy_poll,20",
        b"/config_busy_poll,20,",
        b"/config_busy_poll,,64",
        b"/config_busy_poll,20,64,1",
        b"/config_busy_poll,a,64",
        b"/config_busy_poll,20,0x40",
        b"/config_busy_poll,+20,64",
        b"/config_busy_poll,20,6_4",
        b"/config_busy_poll,2.0,64",
        b"/config_busy_poll,20 ,64",
        b"/config_busy_poll,--20,64",
        b"/config_busy_poll,-,64",
        b"/config_busy_poll,20,64\n",
        b"/config_busy_poll,1000000000,64",
        b"/config_busy_poll,20," + b"9" * 400,
        b"/fin,",
        b"/fin,now",
        b"/fin ",
        b"/host_ok",
        b"/nak",
        b"\0",
        b"\xff\xfe/fin",
        b"/" * 512,
        b"," * 512,
    ],
)
@pytest.mark.parametrize("connected", [False, True])
def test_packet_is_malformed_when_the_protocol_has_no_such_request(packet: bytes, connected: bool) -> None:
    """Unknown verbs, wrong numbers of fields, empty ones, and anything but printable ASCII are refused, always."""
    assert isinstance(parse_request(packet, connected=connected), Malformed)


VERBS = ["/connect", "/version", "/xsk_map_fd", "/config_busy_poll", "/fin", "/nak", ""]

packets = st.one_of(
    st.binary(max_size=512),
    st.builds(
        lambda verb, fields: ",".join([verb, *fields]).encode(),
        st.sampled_from(VERBS),
        st.lists(st.one_of(st.text(max_size=8), st.integers().map(str), st.just(" 20")), max_size=3),
    ),
)


@settings(max_examples=300, deadline=None)
@given(packet=packets, connected=st.booleans())
@example(packet=b"/config_busy_poll," + "٣".encode() + b",64", connected=True)
def test_packet_is_some_request_when_it_is_anything(packet: bytes, connected: bool) -> None:
    """Whatever a pod sends is a request, whose texts are printable and not empty; before /connect it is not granted."""
    request = parse_request(packet, connected=connected)
    assert isinstance(request, typing.get_args(Request))
    for text in (getattr(request, "hostname", "x"), getattr(request, "device", "x")):
        assert text
        assert text.isascii()
        assert text.isprintable()
    if not connected:
        assert isinstance(request, Connect | Malformed)
    if isinstance(request, ConfigBusyPoll):
        assert abs(request.timeout_us) < 2**31
        assert abs(request.budget) < 2**31


# -- Hostnames ---------------------------------------------------------------------------------------------------------

LONG = "deployment-with-a-long-name-in-a-big-cluster-7d4f9c6b8d-x2x5q-and-more-of-it"
"""A pod's name of more than 63 characters."""
DOTTED = "a" * 60 + "-.-" + "b" * 10
"""A pod's name with '-' and '.' where kubelet cuts it."""


@pytest.mark.parametrize(
    ("hostname", "pod"),
    [
        ("pod-x", "pod-x"),
        ("a", "a"),
        ("web-0.db", "web-0.db"),
        ("x" * 63, "x" * 63),
        (LONG, LONG),
        (LONG[:63], LONG),
        (LONG[:54], LONG),
        (LONG[:31], LONG),
        ("a" * 60, DOTTED),
        (DOTTED, DOTTED),
        ("a" * 54, DOTTED),
        ("a" * 31, DOTTED),
        ("a" * 54, "a" * 55),
        ("a" * 31, "a" * 32),
        ("a" * 31, "a" * 31),
        ("a" * 30 + "-", "a" * 30 + "-b"),
        ("a" * 53 + ".", "a" * 53 + ".b"),
        ("x" * 62, "x" * 62 + "-y"),
        ("x" * 61, "x" * 61 + ".-" + "y"),
    ],
)
def test_hostname_matches_when_kubelet_or_a_client_makes_it_of_the_name(hostname: str, pod: str) -> None:
    """The pod's name, its first 63 characters without '-' and '.' at their end, and the first 31 or 54 of it match."""
    assert hostname_matches(hostname, pod)


@pytest.mark.parametrize(
    ("hostname", "pod"),
    [
        ("", "pod-x"),
        ("pod", "pod-x"),
        ("pod-", "pod-x"),
        ("pod-x1", "pod-x"),
        ("Pod-x", "pod-x"),
        ("od-x", "pod-x"),
        ("pod-y", "pod-x"),
        *((LONG[:length], LONG) for length in (1, 15, 30, 32, 53, 55, 62, 64, 70)),
        (LONG[1:32], LONG),
        (LONG[:30] + "X", LONG),
        (LONG[:53] + "X", LONG),
        (DOTTED[:61], DOTTED),
        (DOTTED[:63], DOTTED),
        ("a" * 31, "a" * 30),
        ("a" * 54, "a" * 53),
        ("a" * 30, "a" * 31),
        ("x" * 63, "x" * 62 + "-y"),
        ("x" * 63 + "y", "x" * 63),
    ],
)
def test_hostname_does_not_match_when_it_is_cut_elsewhere(hostname: str, pod: str) -> None:
    """Prefixes of other lengths, longer names and other names are refused."""
    assert not hostname_matches(hostname, pod)


@settings(max_examples=150, deadline=None)
@given(pod=st.text("ab-.", min_size=1, max_size=80), length=st.integers(0, 80))
def test_hostname_matches_a_cut_name_when_the_length_is_known(pod: str, length: int) -> None:
    """Of all prefixes of a name only the lengths that kubelet, CNDP and DPDK make match."""
    own = pod[:63].rstrip("-.")
    lengths = {len(pod), len(own), *(cut for cut in (31, 54) if cut <= len(own))}
    assert hostname_matches(pod[:length], pod) == (len(pod[:length]) in lengths)
