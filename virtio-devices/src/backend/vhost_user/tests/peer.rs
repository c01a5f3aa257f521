//! A scripted vhost-user backend.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
};
use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_net::*;
use vm_memory::Permissions;

use super::super::message::*;
use super::iotlb::Iotlb;
use super::rings::Rings;
use crate::backend::iotlb::Miss;
use crate::backend::vhost_common::VHOST_F_LOG_ALL;
use crate::testing::driver_queue::eventually;

/// The interval at which a thread checks if it must end.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// The abilities of a peer, and its handling of requests.
#[derive(Clone)]
pub(crate) struct Script {
    pub features: u64,
    pub protocol: u64,
    /// The answer to `GET_QUEUE_NUM`.
    pub queue_num: u64,
    /// The number of queues.
    pub queues: usize,
    pub config: Vec<u8>,
    /// Requests that are received and not answered.
    pub mute: Vec<Request>,
    /// Requests that are answered with a refusal.
    pub refused: Vec<Request>,
    /// Buffers of the transmit queues are taken and not given back.
    pub keeps_buffers: bool,
    /// Features never become agreed.
    pub denies_features: bool,
    /// The number of memory regions that it accepts.
    pub memory_slots: u64,
    /// Guest memory is mapped only after [`TestPeer::let_map`].
    pub maps_late: bool,
    /// The state that it saves, and the way it does that.
    pub state: (Vec<u8>, Saves),
    /// The answer to the check of a state that it has saved or loaded.
    pub verdict: u64,
    /// The number of translations that it caches.
    pub iotlb_room: usize,
}

/// The way in which a peer saves its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Saves {
    /// All of it, and then the end.
    All,
    /// All of it, without the end.
    WithoutEnd,
    /// The peer dies then.
    AndDies,
    /// Through a pipe of the peer's own.
    ByOwnPipe,
}

/// The configuration of a NIC with its link up.
pub(crate) const CONFIG: [u8; 12] = [0x52, 0x54, 0, 0, 0, 9, 1, 0, 1, 0, 0x78, 0x05];

impl Script {
    /// A peer with all protocol features, for `pairs` pairs of queues, which counts queues.
    pub(crate) fn new(pairs: usize) -> Self {
        let bits = [
            VIRTIO_F_VERSION_1,
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_MTU,
            VIRTIO_NET_F_STATUS,
            VIRTIO_NET_F_MQ,
            VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
            F_PROTOCOL_FEATURES,
            VHOST_F_LOG_ALL,
        ];
        Self {
            features: bits.iter().fold(0, |features, bit| features | 1 << bit),
            protocol: u64::MAX,
            queue_num: 2 * pairs as u64,
            queues: 2 * pairs,
            config: CONFIG.to_vec(),
            mute: Vec::new(),
            refused: Vec::new(),
            keeps_buffers: false,
            denies_features: false,
            memory_slots: 32,
            maps_late: false,
            state: (b"the peer's own".to_vec(), Saves::All),
            verdict: 0,
            iotlb_room: 2048,
        }
    }

    /// A peer that asks for translations.
    pub(crate) fn translating() -> Self {
        let script = Self::new(1);
        Self { features: script.features | 1 << VIRTIO_F_ACCESS_PLATFORM, ..script }
    }

    /// A peer without the protocol features `bits`.
    pub(crate) fn without(mut self, bits: &[u32]) -> Self {
        bits.iter().for_each(|bit| self.protocol &= !(1 << bit));
        self
    }
}

/// The state that the thread shares with the test.
#[derive(Default)]
struct Shared {
    stop: bool,
    /// Requests as they came.
    heard: Vec<String>,
    channel: Option<OwnedFd>,
    connections: u32,
    /// The configuration to show from now on.
    config: Option<Vec<u8>>,
    /// Rings must be reported as broken.
    breaks: bool,
    /// Buffers that were taken and not given back.
    kept: usize,
    /// The regions of guest memory that it has mapped.
    regions: Vec<(u64, u64)>,
    /// A peer that maps late may continue.
    may_map: bool,
    /// The state that it has loaded.
    loaded: Option<Vec<u8>>,
    /// It drops no more translations, and does not acknowledge invalidations.
    keeps_translations: bool,
    /// The number of misses that it has sent.
    asked: usize,
}

/// A peer in a thread. It dies when this is dropped, and leaves its socket behind as a killed process does.
pub(crate) struct TestPeer {
    shared: Arc<Mutex<Shared>>,
    thread: Option<JoinHandle<()>>,
}

impl TestPeer {
    /// A peer that listens at `path`, which another may have used. Frames go to and come from `wire`.
    pub(crate) fn listen(path: &Path, script: Script, wire: Arc<OwnedFd>) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Self::spawn(script, wire, move || {
            let _ = poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&TICK));
            Some(listener.accept().ok()?.0)
        })
    }

    /// A peer that connects to `path`, as soon as a program listens there.
    pub(crate) fn call(path: PathBuf, script: Script, wire: Arc<OwnedFd>) -> Self {
        Self::spawn(script, wire, move || {
            std::thread::sleep(Duration::from_millis(5));
            UnixStream::connect(&path).ok()
        })
    }

    fn spawn(script: Script, wire: Arc<OwnedFd>, connect: impl Fn() -> Option<UnixStream> + Send + 'static) -> Self {
        let shared = Arc::<Mutex<Shared>>::default();
        let seen = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !seen.lock().stop {
                if let Some(stream) = connect() {
                    seen.lock().connections += 1;
                    let rings = Rings::new(script.queues);
                    let mut session = Session { script: &script, shared: &seen, rings, transfer: None, pipe: None };
                    session.serve(&stream, wire.as_fd());
                    seen.lock().channel = None;
                }
            }
        });
        Self { shared, thread: Some(thread) }
    }

    /// The requests since the last call, in order.
    pub(crate) fn heard(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.lock().heard)
    }

    /// The requests since the last call of [`Self::heard`], once they end with `last`.
    pub(crate) fn await_heard(&self, last: &str) -> Vec<String> {
        let mut heard = Vec::new();
        eventually(last, || {
            heard.extend(self.heard());
            heard.last().is_some_and(|heard| heard == last)
        });
        heard
    }

    pub(crate) fn connections(&self) -> u32 {
        self.shared.lock().connections
    }

    pub(crate) fn kept(&self) -> usize {
        self.shared.lock().kept
    }

    /// Changes the configuration, and reports it.
    pub(crate) fn set_config(&self, config: &[u8]) {
        let mut shared = self.shared.lock();
        shared.config = Some(config.to_vec());
        let header = Header { request: CONFIG_CHANGE, flags: 0, len: 0 }.bytes();
        rustix::net::send(shared.channel.as_ref().unwrap(), &header, SendFlags::empty()).unwrap();
    }

    /// Makes it drop no more translations, and acknowledge no invalidations.
    pub(crate) fn keep_translations(&self) {
        self.shared.lock().keeps_translations = true;
    }

    /// Closes the channel for its misses.
    pub(crate) fn close_channel(&self) {
        self.shared.lock().channel = None;
    }

    /// The number of misses that it has sent.
    pub(crate) fn asked(&self) -> usize {
        self.shared.lock().asked
    }

    /// Sends misses of `address`, as many as there is room for in the channel.
    pub(crate) fn flood(&self, address: u64) -> usize {
        let shared = self.shared.lock();
        let question = question(Miss { address, access: Permissions::Read });
        let send = || rustix::net::send(shared.channel.as_ref().unwrap(), &question, SendFlags::DONTWAIT);
        std::iter::from_fn(|| send().ok()).take(100_000).count()
    }

    /// The state that it has loaded.
    pub(crate) fn loaded(&self) -> Option<Vec<u8>> {
        self.shared.lock().loaded.clone()
    }

    /// The regions of guest memory that it has mapped: addresses and lengths.
    pub(crate) fn regions(&self) -> Vec<(u64, u64)> {
        self.shared.lock().regions.clone()
    }

    /// Lets a peer that maps late do so from now on, or not.
    pub(crate) fn let_map(&self, lets: bool) {
        self.shared.lock().may_map = lets;
    }

    /// Reports a ring as invalid.
    pub(crate) fn call_rings_broken(&self) {
        self.shared.lock().breaks = true;
    }
}

impl Drop for TestPeer {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        let result = self.thread.take().unwrap().join();
        assert!(result.is_ok() || std::thread::panicking(), "the peer's thread has panicked");
    }
}

/// A connection of a peer.
struct Session<'a> {
    script: &'a Script,
    shared: &'a Mutex<Shared>,
    rings: Rings,
    /// The thread that reads or writes its state.
    transfer: Option<JoinHandle<Vec<u8>>>,
    /// The end of a pipe that stays open.
    pipe: Option<File>,
}

impl Session<'_> {
    fn serve(&mut self, stream: &UnixStream, wire: BorrowedFd<'_>) {
        loop {
            let readable = {
                let mut fds = vec![PollFd::new(stream, PollFlags::IN), PollFd::from_borrowed_fd(wire, PollFlags::IN)];
                // Without a buffer for it a frame stays where it is.
                let waited = if self.rings.can_receive() { 2 } else { 1 };
                fds.truncate(waited);
                self.rings.kicks().for_each(|kick| fds.push(PollFd::from_borrowed_fd(kick, PollFlags::IN)));
                let _ = poll(&mut fds, Some(&TICK));
                !fds[0].revents().is_empty()
            };
            if self.shared.lock().stop {
                return;
            }
            if std::mem::take(&mut self.shared.lock().breaks) {
                self.rings.call_broken();
            }
            if readable && !self.answer_one(stream) {
                return;
            }
            let kept = self.rings.carry(wire, self.script.keeps_buffers);
            let shared = &mut *self.shared.lock();
            shared.kept += kept;
            for miss in self.rings.misses() {
                shared.asked += 1;
                rustix::net::send(shared.channel.as_ref().unwrap(), &question(miss), SendFlags::NOSIGNAL).unwrap();
            }
        }
    }

    /// Receives one request. Returns true if the other side is still connected.
    fn answer_one(&mut self, stream: &UnixStream) -> bool {
        let mut header = [0; HEADER];
        // A request comes in one piece: it is sent in one piece, and is small.
        let Some(fds) = receive(stream, &mut header) else { return false };
        let header = Header::parse(header).expect("a request of version 1");
        let mut payload = vec![0; header.len as usize];
        if !payload.is_empty() {
            let received = rustix::net::recv(stream, &mut payload, RecvFlags::WAITALL).unwrap();
            assert_eq!(received.0, header.len as usize);
        }
        let (name, answer, fd) = self.obey(header.request, &payload, fds);
        self.shared.lock().heard.push(name);
        let is = |requests: &[Request]| requests.iter().any(|request| request.0 == header.request);
        let is_of_iotlb = header.request == Request::IOTLB_MSG.0;
        assert!(!is_of_iotlb || header.flags & NEED_REPLY != 0, "it has to be acknowledged");
        if is(&self.script.mute) || is_of_iotlb && self.shared.lock().keeps_translations {
            return true;
        }
        let answer = match answer {
            Ok(Some(answer)) => answer,
            done if header.flags & NEED_REPLY != 0 => longs(&[u64::from(done.is_err() || is(&self.script.refused))]),
            // A peer that cannot refuse closes the connection.
            Err(()) => return false,
            Ok(None) => return true,
        };
        respond(stream, header.request, &answer, fd);
        true
    }

    /// The configuration as it is now.
    fn config(&self) -> Vec<u8> {
        self.shared.lock().config.clone().unwrap_or_else(|| self.script.config.clone())
    }

    /// Carries out a request. Returns its name, and the answer, if it has one.
    fn obey(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> (String, Result<Option<Vec<u8>>, ()>, Option<OwnedFd>) {
        let long = || u64_at(payload, 0).unwrap();
        let queue = || (long() & 0xff) as usize;
        let (index, number) = (u32_at(payload, 0).unwrap_or(0), u32_at(payload, 4).unwrap_or(0));
        let named = |name: &str, answer: Option<Vec<u8>>| (name.to_owned(), Ok(answer), None);
        let count = fds.len();
        let mut fd = fds.into_iter();
        match request {
            1 => named("GET_FEATURES", Some(longs(&[self.script.features]))),
            2 => {
                self.rings.logs = long() & 1 << 26 != 0;
                let translates = long() & 1 << VIRTIO_F_ACCESS_PLATFORM != 0;
                if translates != self.rings.iotlb.is_some() {
                    let iotlb = || Arc::new(Iotlb::with_room(self.script.iotlb_room));
                    self.rings.iotlb = translates.then(iotlb);
                }
                named(&format!("SET_FEATURES {:#x}", long()), None)
            }
            3 => named("SET_OWNER", None),
            5 => {
                self.await_leave_to_map();
                self.rings.map(payload, fd.collect());
                self.shared.lock().regions = self.rings.regions();
                named(&format!("SET_MEM_TABLE {index} fds={count}"), None)
            }
            6 => {
                self.rings.log = fd.next().map(File::from);
                named(&format!("LOG_BASE fds={count}"), Some(longs(&[0])))
            }
            8 => named(&format!("NUM {index}={number}"), self.rings.set(index, |ring| ring.size = number as u16)),
            9 => {
                let [descriptors, used, available] = [8, 16, 24].map(|at| u64_at(payload, at).unwrap());
                let log = (number & 1 != 0).then(|| u64_at(payload, 32).unwrap());
                let known = self.rings.set(index, |ring| {
                    (ring.addresses, ring.log) = ([descriptors, available, used], log);
                });
                let logged = log.map(|at| format!(" log={at:#x}")).unwrap_or_default();
                named(&format!("ADDR {index}{logged}"), known)
            }
            10 => named(&format!("BASE {index}={number}"), self.rings.set(index, |ring| ring.base = number as u16)),
            11 => {
                let base = self.rings.stop(index);
                named(&format!("GET_BASE {index}"), Some(numbers(&[index, base.into()])))
            }
            12 => {
                self.rings.start(queue(), fd.next().unwrap());
                named(&format!("KICK {}", queue()), None)
            }
            13 => {
                let name = format!("CALL {}{}", queue(), if long() & NO_FD == 0 { "" } else { " none" });
                let known = queue() < self.script.queues;
                if known {
                    self.rings.set(queue() as u32, |ring| ring.call = fd.next());
                }
                (name, if known { Ok(None) } else { Err(()) }, None)
            }
            14 => named(&format!("ERR {}", queue()), self.rings.set(queue() as u32, |ring| ring.error = fd.next())),
            15 => named("GET_PROTOCOL_FEATURES", Some(longs(&[self.script.protocol]))),
            16 => named(&format!("SET_PROTOCOL_FEATURES {:#x}", long()), None),
            17 => named("GET_QUEUE_NUM", Some(longs(&[self.script.queue_num]))),
            18 => named(&format!("ENABLE {index}={number}"), self.rings.set(index, |ring| ring.enabled = number == 1)),
            21 => {
                self.shared.lock().channel = fd.next();
                named("SET_BACKEND_REQ_FD", None)
            }
            22 if self.shared.lock().keeps_translations => named("IOTLB", None),
            22 => named(&self.rings.learn(payload), None),
            24 => {
                let config = self.config();
                // A request for more than it has gets an empty answer.
                let (size, config) = if number as usize > config.len() { (0, &[][..]) } else { (number, &config[..]) };
                let config = &config[..size as usize];
                named("GET_CONFIG", Some([&numbers(&[index, size, 0]), config].concat()))
            }
            25 => {
                let (mut config, at) = (self.config(), index as usize);
                config[at..at + number as usize].copy_from_slice(&payload[12..]);
                self.shared.lock().config = Some(config);
                named(&format!("SET_CONFIG {index}={:?}", &payload[12..]), None)
            }
            31 => {
                let file = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                let shape = [&longs(&[4096, 0]), &payload[16..]].concat();
                (format!("GET_INFLIGHT {}", shape_of(payload)), Ok(Some(shape)), Some(file))
            }
            32 => named(&format!("SET_INFLIGHT {} size={} fds={count}", shape_of(payload), long()), None),
            36 => named("GET_MAX_MEM_SLOTS", Some(longs(&[self.script.memory_slots]))),
            37 => {
                let name = format!("ADD_MEM_REG {:#x} fds={count}", u64_at(payload, 8).unwrap());
                if self.script.refused.contains(&Request::ADD_MEM_REG) {
                    return (name, Err(()), None);
                }
                self.await_leave_to_map();
                self.rings.add(payload, fd.next().unwrap());
                self.shared.lock().regions = self.rings.regions();
                named(&name, None)
            }
            39 => {
                self.rings.status = long();
                named(&format!("STATUS {}", long()), None)
            }
            40 => {
                let denied = if self.script.denies_features { 8 } else { 0 };
                named("GET_STATUS", Some(longs(&[self.rings.status & !denied])))
            }
            42 => {
                let (pipe, kept) = (File::from(fd.next().unwrap()), self.rings.are_stopped());
                assert_eq!((count, payload.len(), number, kept), (1, 8, 0, true), "one pipe, while no ring runs");
                (format!("STATE {}", ["save", "load"][index as usize]), self.transfer(index == 1, pipe), None)
            }
            43 => {
                let done = self.transfer.take().map(|transfer| transfer.join().unwrap());
                self.shared.lock().loaded = done.filter(|state| !state.is_empty());
                named("CHECK", Some(longs(&[self.script.verdict])))
            }
            other => panic!("request {other}"),
        }
    }
}

impl Session<'_> {
    fn await_leave_to_map(&self) {
        while self.script.maps_late && !self.shared.lock().may_map && !self.shared.lock().stop {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Loads or saves its state in a thread, for which the check waits. Returns the answer.
    fn transfer(&mut self, loads: bool, mut pipe: File) -> Result<Option<Vec<u8>>, ()> {
        if self.script.refused.contains(&Request::SET_DEVICE_STATE_FD) {
            return Ok(Some(longs(&[1 | NO_FD])));
        }
        let (state, how) = self.script.state.clone();
        match how {
            Saves::ByOwnPipe => return Ok(Some(longs(&[0]))),
            Saves::WithoutEnd => self.pipe = Some(pipe.try_clone().unwrap()),
            Saves::AndDies if !loads => self.shared.lock().stop = true,
            Saves::All | Saves::AndDies => {}
        }
        self.transfer = Some(std::thread::spawn(move || {
            let mut loaded = Vec::new();
            // The other side may give up.
            let _ = if loads { pipe.read_to_end(&mut loaded).map(drop) } else { pipe.write_all(&state) };
            loaded
        }));
        Ok(Some(longs(&[NO_FD])))
    }
}

/// A miss as a message.
fn question(miss: Miss) -> Vec<u8> {
    let [read, write] = [Permissions::Read, Permissions::Write].map(|access| u8::from(miss.access.allow(access)));
    let about = [read | write << 1, 1, 0, 0, 0, 0, 0, 0];
    [Header { request: 1, flags: 0, len: 32 }.bytes(), longs(&[miss.address, 0, 0]), about.to_vec()].concat()
}

/// Receives a whole header, with the descriptors that came with it.
fn receive(stream: &UnixStream, header: &mut [u8; HEADER]) -> Option<Vec<OwnedFd>> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [std::io::IoSliceMut::new(header)];
    let received = recvmsg(stream, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
    let fds = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
        _ => Vec::new(),
    });
    let fds = fds.collect();
    (received.bytes == HEADER).then_some(fds)
}

fn shape_of(payload: &[u8]) -> String {
    let counts = u32_at(payload, 16).unwrap();
    assert_eq!(payload.len(), 24);
    format!("queues={} of {}", counts & 0xffff, counts >> 16)
}

fn respond(stream: &UnixStream, request: u32, payload: &[u8], fd: Option<OwnedFd>) {
    let header = Header { request, flags: REPLY, len: payload.len() as u32 };
    let message = [header.bytes(), payload.to_vec()].concat();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    // The other side may have given up.
    let _ = rustix::net::sendmsg(stream, &[std::io::IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL);
}
