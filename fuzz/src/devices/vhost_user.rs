//! A vhost-user peer that sends any replies, or none, and any messages on its own channel.
//!
//! All replies are in the socket before the conversation begins, so nothing waits. The peer must never get a request
//! for a feature that it does not offer, the device configuration must not exceed the length for its role, and each
//! descriptor received with a reply must be closed in the end.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use virtio_devices::testing::VhostUserSteps;
use virtio_devices::{GuestMap, VhostUserRole};
use vm_memory::{FileOffset, GuestAddress};

use crate::input::{Input, Seed};

const ROLES: [VhostUserRole; 4] = [
    VhostUserRole::Nic { queue_pairs: 1 },
    VhostUserRole::Nic { queue_pairs: 2 },
    VhostUserRole::Device { queues: 2, features: u64::MAX, config: 60 },
    VhostUserRole::Device { queues: 3, features: 1 << 32, config: 0 },
];
/// The length of a message's header.
const HEADER: usize = 12;
/// The most replies: they must fit into the socket.
const MOST_ANSWERS: u8 = 48;

// Requests.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const GET_VRING_BASE: u32 = 11;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const GET_QUEUE_NUM: u32 = 17;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
const GET_INFLIGHT: u32 = 31;
const GET_MAX_MEM_SLOTS: u32 = 36;
const GET_STATUS: u32 = 40;

/// The requests that require a protocol feature.
const NEEDS: [(u32, u32); 11] = [
    (GET_QUEUE_NUM, 0),
    (SET_BACKEND_REQ_FD, 5),
    (GET_CONFIG, 9),
    (25, 9),
    (GET_INFLIGHT, 12),
    (32, 12),
    (GET_MAX_MEM_SLOTS, 15),
    (37, 15),
    (39, 16),
    (GET_STATUS, 16),
    (GET_PROTOCOL_FEATURES, u32::MAX),
];

// Faults of a reply.
const NO_REPLY: u8 = 1;
const CUT: u8 = 2;
const WITH_FD: u8 = 4;

// The kinds of operation, after the negotiation.
const RUNS_ALL: u8 = 0;
const MAP: u8 = 1;
const START: u8 = 2;
const HEAR: u8 = 3;
const WRITE_CONFIG: u8 = 4;
const PAIRS: u8 = 5;
const STOP: u8 = 6;
const KINDS: u8 = 7;

thread_local! {
    static MEMORY: GuestMap = {
        let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).expect("the host makes files in memory"));
        file.set_len(0x1_0000).expect("room for the memory");
        let range = (GuestAddress(0), 0x1_0000, Some(FileOffset::new(file, 0)));
        GuestMap::from_ranges_with_files([range]).expect("memory for a guest")
    };
}

/// A message with a valid header.
fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    [[request, flags | 1, payload.len() as u32].map(u32::to_ne_bytes).concat(), payload.to_vec()].concat()
}

/// The far end of the connection.
struct Far {
    stream: UnixStream,
    /// The unread bytes of the replies. A truncated reply continues with the beginning of the next.
    answers: VecDeque<u8>,
    requests: Vec<u8>,
    channel: Option<UnixStream>,
    features: u64,
    offered: u64,
    taken: u64,
    asked: usize,
}

impl Far {
    /// Writes all replies to the socket.
    fn answer_all(&mut self, input: &mut Input<'_>, fd: BorrowedFd<'_>) {
        for _ in 0..input.u8() % MOST_ANSWERS {
            let (request, wrong, len) = (input.u8(), input.u8(), input.u8());
            let payload = input.slice(len.into());
            let flags = if wrong & NO_REPLY != 0 { 0 } else { 4 };
            let mut bytes = message(request.into(), flags, payload);
            if wrong & CUT != 0 {
                bytes.pop();
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            let fds = [fd];
            if wrong & WITH_FD != 0 {
                ancillary.push(SendAncillaryMessage::ScmRights(&fds));
            }
            if sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::DONTWAIT) != Ok(bytes.len()) {
                break;
            }
            self.answers.extend(bytes);
        }
        self.stream.shutdown(Shutdown::Write).expect("a socket");
    }

    /// The payload of the next reply, as parsed from the bytes.
    fn next_answer(&mut self) -> Option<Vec<u8>> {
        let header: Vec<u8> = self.answers.drain(..HEADER.min(self.answers.len())).collect();
        let len = u32::from_ne_bytes(*header.get(8..)?.first_chunk()?) as usize;
        Some(self.answers.drain(..len.min(self.answers.len())).collect())
    }

    /// Reads the requests, and checks them.
    fn read(&mut self) {
        let mut bytes = [0; 4096];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let received = recvmsg(&self.stream, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags);
            let Some(len) = received.map(|received| received.bytes).ok().filter(|len| *len > 0) else { break };
            self.requests.extend(&bytes[..len]);
            for message in ancillary.drain() {
                let RecvAncillaryMessage::ScmRights(fds) = message else { continue };
                for fd in fds {
                    // Only its channel is a socket.
                    let stream = UnixStream::from(fd);
                    if stream.set_nonblocking(true).is_ok() && stream.peer_addr().is_ok() {
                        self.channel = Some(stream);
                    }
                }
            }
        }
        while let Some((header, rest)) = self.requests.split_first_chunk::<HEADER>() {
            let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("4 bytes"));
            let (request, flags, len) = (word(0), word(4), word(8) as usize);
            let Some(payload) = rest.get(..len).map(<[u8]>::to_vec) else { break };
            self.requests.drain(..HEADER + len);
            self.check(request, flags, &payload);
        }
    }

    /// Checks a request, and removes its reply from the unread bytes.
    fn check(&mut self, request: u32, flags: u32, payload: &[u8]) {
        let long = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        self.asked += 1;
        assert_eq!(flags & !8, 1, "request {request} of another version");
        assert!(payload.len() <= HEADER + 256, "request {request} of {} bytes", payload.len());
        assert!(flags & 8 == 0 || self.taken >> 3 & 1 == 1, "request {request} cannot be acknowledged");
        for (_, feature) in NEEDS.iter().filter(|(known, feature)| *known == request && *feature != u32::MAX) {
            assert!(self.taken >> feature & 1 == 1, "request {request} needs what the peer does not offer");
        }
        if [15, 16, 18].contains(&request) {
            assert!(self.features >> 30 & 1 == 1, "request {request} to a peer without protocol features");
        }
        match request {
            SET_PROTOCOL_FEATURES => {
                self.taken = long(payload);
                assert_eq!(self.taken & !self.offered, 0, "protocol features that the peer does not offer");
            }
            SET_FEATURES => assert_eq!(long(payload) & !self.features, 0, "features that the peer does not offer"),
            _ => {}
        }
        let asks = [GET_FEATURES, GET_VRING_BASE].contains(&request)
            || NEEDS.iter().any(|(known, _)| *known == request)
                && ![25, 32, 37, 39, SET_BACKEND_REQ_FD].contains(&request);
        if (asks || flags & 8 != 0)
            && let Some(answer) = self.next_answer()
        {
            match request {
                GET_FEATURES if self.asked == 1 => self.features = long(&answer),
                GET_PROTOCOL_FEATURES => self.offered = long(&answer),
                _ => {}
            }
        }
    }
}

/// Runs the conversation of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns true if the peer was accepted, the number of requests to it, and of successful operations.
fn run_to_end(input: &[u8]) -> (bool, usize, usize) {
    let mut input = Input::new(input);
    let role = ROLES[usize::from(input.u8()) % ROLES.len()];
    let (near, stream) = UnixStream::pair().expect("a pair of sockets");
    let (mut witness, sent) = io::pipe().expect("a pipe");
    let mut far = Far {
        stream,
        answers: Default::default(),
        requests: Vec::new(),
        channel: None,
        features: 0,
        offered: 0,
        taken: 0,
        asked: 0,
    };
    far.answer_all(&mut input, sent.as_fd());
    let mut peer = VhostUserSteps::negotiate(near, role).expect("an eventfd");
    far.read();
    let (taken, mut done) = (peer.is_some(), 0);
    while let Some(steps) = &mut peer
        && !input.is_empty()
    {
        check_config(steps, role);
        let queues = [0, 1, 2, 3];
        let succeeded = MEMORY.with(|memory| match input.u8() % KINDS {
            RUNS_ALL => steps.runs_all().is_some(),
            MAP => steps.map(memory).is_some(),
            START => steps.start(memory, u16::from(input.u8() % 5), input.u64()).is_some(),
            HEAR => {
                let len = input.u8();
                if let Some(channel) = &mut far.channel {
                    // Without room the message is dropped.
                    let _ = channel.write(input.slice(len.into()));
                }
                steps.hear().is_some()
            }
            WRITE_CONFIG => {
                let (offset, len) = (input.u8(), input.u8() % 65);
                steps.write_config(offset.into(), input.slice(len.into())).is_some()
            }
            PAIRS => steps.set_active_pairs(&queues, input.u8().into()).is_some(),
            STOP => steps.stop(input.u8().into()).is_some(),
            _ => false,
        });
        far.read();
        done += usize::from(succeeded);
        if !succeeded {
            break;
        }
    }
    if let Some(steps) = &peer {
        check_config(steps, role);
    }
    let asked = far.asked;
    drop((peer, far, sent));
    assert_eq!(witness.read(&mut [0]).ok(), Some(0), "a descriptor of the peer's is still open");
    (taken, asked, done)
}

fn check_config(steps: &VhostUserSteps, role: VhostUserRole) {
    let most = match role {
        VhostUserRole::Nic { .. } => 12,
        VhostUserRole::Device { config, .. } => config as usize,
    };
    assert!(steps.config().len() <= most, "{} bytes of configuration", steps.config().len());
    assert!(steps.config().is_empty() || steps.protocol() >> 9 & 1 == 1);
    let (mac, mtu, _) = steps.nic();
    assert!(mac.is_none() || steps.config().len() >= 6);
    assert!(mtu.is_none() || steps.config().len() >= 12);
}

/// A reply with a 64-bit value.
fn long(request: u32, value: u64) -> (u32, Vec<u8>) {
    (request, value.to_ne_bytes().to_vec())
}

/// An acknowledgement.
fn ack(request: u32) -> (u32, Vec<u8>) {
    long(request, 0)
}

fn config(bytes: &[u8]) -> (u32, Vec<u8>) {
    (GET_CONFIG, [[0, bytes.len() as u32, 0].map(u32::to_ne_bytes).concat(), bytes.to_vec()].concat())
}

fn conversation(role: u8, answers: &[(u32, Vec<u8>)], operations: &[u8]) -> Seed {
    let seed = Seed::new().with([role, answers.len() as u8]);
    let seed = answers.iter().fold(seed, |seed, (request, payload)| {
        let wrong = if *request == GET_INFLIGHT { WITH_FD } else { 0 };
        seed.with([*request as u8, wrong, payload.len() as u8]).with(payload)
    });
    seed.with(operations)
}

/// Seeds: a peer with all protocol features that runs a NIC, sends messages, and stops; one without any; a device whose
/// configuration is shorter than requested; a peer that refuses; a silent one.
pub fn seeds() -> Vec<Vec<u8>> {
    // VERSION_1, MAC, STATUS, MTU and protocol features.
    let features = 1 << 32 | 1 << 30 | 1 << 16 | 1 << 5 | 1 << 3;
    let nic = [0x52, 0x54, 0, 0, 0, 9, 1, 0, 1, 0, 0x78, 5];
    // SET_OWNER, the memory's slots, the configuration, the channel.
    let mut all = vec![long(1, features), long(15, u64::MAX), ack(3), long(36, 32), config(&nic), ack(21), long(17, 2)];
    // The table of memory, the features, the status twice, memory for in-flight requests.
    all.extend([ack(5), ack(2), ack(39), long(40, 11), (GET_INFLIGHT, [1u64, 0, 0].map(u64::to_ne_bytes).concat())]);
    all.extend([ack(32), ack(8), ack(10), ack(9), ack(13), ack(14), ack(12), ack(18), ack(39)]);
    let heard = message(2, 8, &[]);
    all.extend([
        config(&nic),
        ack(25),
        config(&nic),
        ack(18),
        (GET_VRING_BASE, [0u32, 7].map(u32::to_ne_bytes).concat()),
    ]);
    let start = [&[RUNS_ALL, MAP, START, 1][..], &features.to_le_bytes()].concat();
    let rest = [&[HEAR, heard.len() as u8][..], &heard, &[WRITE_CONFIG, 0, 1, 5, STOP, 0]].concat();
    let all = conversation(0, &all, &[start.clone(), rest].concat());
    let plain = [long(1, 1 << 32), long(1, 1 << 32), long(1, 1 << 32)];
    let plain = conversation(0, &plain, &[RUNS_ALL, MAP, RUNS_ALL, PAIRS, 1]);
    let refused = (GET_CONFIG, [0u32; 3].map(u32::to_ne_bytes).concat());
    let device = [
        vec![long(1, 1 << 30), long(15, 1 << 9), refused],
        [30, 45, 52, 56, 58, 59].map(|len| config(&[1; 59][..len])).into(),
    ]
    .concat();
    let device = conversation(2, &device, &[RUNS_ALL]);
    let refuses = conversation(1, &[long(1, 1 << 30), long(15, 1 << 3), long(3, 1)], &[]);
    // The first reply lacks its last byte, so the next one's first byte is used in its place.
    let cut = Seed::new().with([0, 3, 1, CUT, 8, 0, 0, 0, 0, 1, 10, 0, 0, 0xbb, 0xc3, 1]);
    let cut = cut.with([0x25; 81]).with([0, 8, 0, 0, 0, 0x25, 0x25, 0x25]);
    [all, plain, device, refuses, cut, Seed::new()].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_taken_and_refused() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert_eq!(done, [(true, 27, 6), (true, 5, 4), (true, 11, 1), (false, 4, 0), (true, 16, 0), (false, 1, 0)]);
    }
}
