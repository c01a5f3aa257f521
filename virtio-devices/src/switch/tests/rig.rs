//! Ports with the driver side in this process.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_PROMISC,
    VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_RX, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MRG_RXBUF,
};
use vm_memory::GuestAddress;

use crate::backend::Tap;
use crate::frames::policy::Policy;
use crate::net::testing::sockets;
use crate::switch::worker::SwitchWorker;
use crate::switch::{PortSettings, Switch, SwitchMode, SwitchSpec};
use crate::testing::driver_queue::{DriverQueue, WRITE, eventually};
use crate::{
    Counter, DmaSpace, GuestMap, HostNic, Interrupts, Memory, Net, NetSpec, RateLimits, Start, Translate, VirtioDevice,
    Worker,
};

/// The size of all queues.
pub(super) const SIZE: u16 = 256;
/// The offset of a port's rings, in rings of a [`DriverQueue`]: a port has at most nine.
const RINGS: u16 = 10;
/// The control queue, at a fixed index.
const CONTROL: u16 = 8;
/// The start of the area for sent and received frames.
const FRAMES: u64 = 64 << 20;
/// The size of a port's part of it.
const AREA: u64 = 8 << 20;
/// The offsets in it of sent frames, and of receive buffers.
const TO_SEND: u64 = 0;
const TO_RECEIVE: u64 = 4 << 20;

/// The features that drivers negotiate.
pub(super) const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_NET_F_CTRL_VQ
    | 1 << VIRTIO_NET_F_CTRL_RX
    | 1 << VIRTIO_NET_F_CTRL_MAC_ADDR
    | 1 << VIRTIO_NET_F_MRG_RXBUF;

pub(super) const BROADCAST: [u8; 6] = [0xff; 6];

/// The address of a port.
pub(super) const fn mac(port: u16) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, port as u8]
}

/// A frame of `len` bytes.
pub(super) fn frame(from: [u8; 6], to: [u8; 6], len: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame
}

/// The policy of a VF, unless the test sets another.
pub(super) fn untrusted() -> Policy {
    Policy { trusted: false, spoof_check: true, ..Policy::default() }
}

/// A switch, and a NIC at each of its ports.
pub(super) struct Lan {
    pub nics: Vec<Nic>,
    pub switch: Switch,
    /// The other end of the uplink.
    pub peer: Option<OwnedFd>,
}

pub(super) struct Config {
    pub id: &'static str,
    pub mode: SwitchMode,
    pub ports: u16,
    pub workers: u16,
    pub uplink: bool,
    /// The pairs of each VF; a PF has one.
    pub pairs: u16,
}

impl Config {
    pub(super) const fn closed(ports: u16) -> Self {
        Self { id: "pf0", mode: SwitchMode::Veb, ports, workers: 1, uplink: false, pairs: 1 }
    }

    pub(super) const fn open(ports: u16) -> Self {
        Self { uplink: true, ..Self::closed(ports) }
    }
}

impl Lan {
    /// A trusted PF, and untrusted VFs. No driver runs.
    pub(super) fn new(config: &Config) -> Self {
        Self::of(config, |_, _| {})
    }

    /// The same, with NICs changed by `change`, by port.
    pub(super) fn of(config: &Config, change: impl FnMut(u16, &mut NetSpec)) -> Self {
        let (near, far) = sockets();
        let &Config { id, mode, ports, workers, uplink, pairs } = config;
        let uplink = uplink.then(|| Tap::over_sockets(vec![near]));
        let peer = uplink.is_some().then_some(far);
        let spec = SwitchSpec { id: id.into(), mode, ports, workers, uplink, uplink_rate: None };
        let switch = Switch::new(spec).unwrap();
        Self { nics: Self::nics(&switch, ports, pairs, change), switch, peer }
    }

    /// A closed switch without threads: the test does its worker's work. All drivers run, without buffers.
    pub(super) fn stepped(ports: u16) -> (Self, SwitchWorker) {
        Self::stepped_with(ports, 1, FEATURES)
    }

    /// The same, with VFs of `pairs` pairs of queues, and drivers that have negotiated `features`.
    pub(super) fn stepped_with(ports: u16, pairs: u16, features: u64) -> (Self, SwitchWorker) {
        Self::stepped_over(None, None, ports, pairs, features)
    }

    /// The same, with an uplink of this rate in Mbit/s that only takes frames.
    pub(super) fn stepped_at(ports: u16, uplink_rate: Option<NonZeroU32>) -> (Self, SwitchWorker) {
        Self::stepped_over(Some(sockets()), uplink_rate, ports, 1, FEATURES)
    }

    fn stepped_over(
        uplink: Option<(OwnedFd, OwnedFd)>,
        uplink_rate: Option<NonZeroU32>,
        ports: u16,
        pairs: u16,
        features: u64,
    ) -> (Self, SwitchWorker) {
        let (near, peer) = uplink.unzip();
        let uplink = near.map(|near| Tap::over_sockets(vec![near]));
        let spec = SwitchSpec { id: "pf0".into(), mode: SwitchMode::Veb, ports, workers: 1, uplink, uplink_rate };
        let (switch, mut worker) = Switch::stepped(spec).unwrap();
        let mut lan = Self { nics: Self::nics(&switch, ports, pairs, |_, _| {}), switch, peer };
        lan.nics.iter_mut().for_each(|nic| nic.start(features));
        worker.begin();
        worker.step(Some(Duration::ZERO));
        lan.settle();
        (lan, worker)
    }

    fn nics(switch: &Switch, ports: u16, pairs: u16, mut change: impl FnMut(u16, &mut NetSpec)) -> Vec<Nic> {
        let len = FRAMES + u64::from(ports) * AREA;
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap();
        let pairs = |port| if port == 0 { 1 } else { pairs };
        (0..ports).map(|port| Nic::new(port, pairs(port), switch, &memory, |spec| change(port, spec))).collect()
    }

    /// Drivers that have negotiated [`FEATURES`], buffers in all receive queues, and no promiscuous PF.
    pub(super) fn running(config: &Config) -> Self {
        let mut lan = Self::new(config);
        for nic in &mut lan.nics {
            nic.start(FEATURES);
            nic.provide(64, 2048);
        }
        lan.nics[0].set_promiscuous(false);
        lan.settle();
        lan
    }

    /// Waits until the table matches the ports.
    pub(super) fn settle(&self) {
        self.switch.set_port(0, PortSettings::default()).wait().unwrap();
    }

    /// Sends a frame from the uplink, and waits until it has been forwarded.
    pub(super) fn send_from_uplink(&self, frame: &[u8]) {
        let counters = self.switch.uplink_counters().unwrap();
        let seen = || [Counter::RxFrames, Counter::RxUnknown].iter().map(|c| counters.get(*c)).sum::<u64>();
        let before = seen();
        crate::net::testing::send(self.peer.as_ref().unwrap(), &[&[0; 12], frame].concat());
        eventually("a frame from the uplink", || seen() > before);
    }

    /// The frames at the uplink since the last call, without headers.
    pub(super) fn at_uplink(&self) -> Vec<Vec<u8>> {
        let Some(peer) = &self.peer else { return Vec::new() };
        std::iter::from_fn(|| crate::net::testing::receive(peer)).map(|data| data[12..].to_vec()).collect()
    }

    pub(super) fn count(&self, port: u16, counter: Counter) -> u64 {
        // A worker returns frames, and then adds its counts for their sender and receivers. A test may hold the lock of
        // a port itself.
        for sender in 0..self.nics.len() as u16 {
            if let Some(open) = self.switch.0.core().open_port(sender) {
                drop(open.tx.try_lock_for(Duration::from_secs(1)));
            }
        }
        self.nics[usize::from(port)].net.counters().get(counter)
    }
}

/// A NIC and its driver.
pub(super) struct Nic {
    pub net: Net,
    pub rx: DriverQueue,
    pub tx: DriverQueue,
    /// The queues of further pairs.
    pub further: Vec<[DriverQueue; 2]>,
    control: DriverQueue,
    pub interrupts: Arc<Interrupts>,
    pub workers: Vec<Worker>,
    memory: GuestMap,
    /// The IOMMU of the port, from its next start on.
    pub iommu: Option<Arc<dyn Translate>>,
    port: u16,
    /// The addresses of the buffers, by the heads of their chains.
    buffers: HashMap<u32, u64>,
    provided: u64,
    sent: u64,
}

impl Nic {
    fn new(port: u16, pairs: u16, switch: &Switch, memory: &GuestMap, change: impl FnOnce(&mut NetSpec)) -> Self {
        let mut spec = NetSpec {
            queue_pairs: pairs,
            queue_size: SIZE,
            policy: if port == 0 { Policy::default() } else { untrusted() },
            ..NetSpec::new(&format!("pf0v{port}"), mac(port))
        };
        change(&mut spec);
        let net = Net::new(spec, switch.port(port).unwrap()).unwrap();
        let mut nic = Self {
            net,
            rx: DriverQueue::new(memory, RINGS * port, SIZE),
            tx: DriverQueue::new(memory, RINGS * port + 1, SIZE),
            further: (1..pairs)
                .map(|pair| [0, 1].map(|queue| DriverQueue::new(memory, RINGS * port + 2 * pair + queue, SIZE)))
                .collect(),
            control: DriverQueue::new(memory, RINGS * port + CONTROL, 64),
            interrupts: Arc::new(Interrupts::new(9, 10)),
            workers: Vec::new(),
            memory: memory.clone(),
            iommu: None,
            port,
            buffers: HashMap::new(),
            provided: 0,
            sent: 0,
        };
        nic.map_vectors();
        nic
    }

    fn map_vectors(&mut self) {
        (0..9).for_each(|queue| self.interrupts.set_queue_vector(queue, queue));
    }

    pub(super) fn memory(&self) -> &GuestMap {
        &self.memory
    }

    /// The address of its first sent frame, with the header.
    pub(super) fn send_area(&self) -> u64 {
        self.area() + TO_SEND
    }

    /// Makes the frame there available once more.
    pub(super) fn queue_again(&mut self, len: u32) {
        self.tx.add(&[(self.send_area(), len, 0)]);
    }

    fn area(&self) -> u64 {
        FRAMES + u64::from(self.port) * AREA
    }

    /// The first and the last address of its rings, and the same of its buffers.
    pub(super) fn places(&self) -> [(u64, u64); 2] {
        let rings = u64::from(RINGS * self.port) << 16;
        [(rings, rings + (u64::from(RINGS) << 16) - 1), (self.area(), self.area() + AREA - 1)]
    }

    pub(super) fn start(&mut self, features: u64) {
        let further = self.further.iter().flatten();
        let queues = [&self.rx, &self.tx].into_iter().chain(further).chain([&self.control]);
        let memory = Memory::new(self.memory.clone());
        let start = Start {
            memory: match &self.iommu {
                Some(iommu) => DmaSpace::translated(memory, Arc::clone(iommu)),
                None => memory.into(),
            },
            features,
            queues: (0..).zip(queues).map(|(index, queue)| (index, Arc::clone(&queue.queue))).collect(),
            interrupts: Arc::clone(&self.interrupts),
            log: None,
        };
        self.workers = self.net.start(start).unwrap();
        self.kick();
    }

    pub(super) fn kick(&self) {
        self.workers.iter().for_each(Worker::wake);
    }

    /// Stops the queues, as a driver's reset does, and waits for that.
    pub(super) fn stop(&mut self) {
        for worker in self.workers.drain(..) {
            worker.stop().join().unwrap();
        }
    }

    /// A reset, after which the driver sets up new rings.
    pub(super) fn reset(&mut self) {
        self.stop();
        self.net.reset();
        let memory = &self.memory;
        for queue in 0..RINGS {
            let base = u64::from(RINGS * self.port + queue) << 16;
            let zeros = vec![0; 1 << 16];
            vm_memory::Bytes::write_slice(memory, &zeros, GuestAddress(base)).unwrap();
        }
        self.rx = DriverQueue::new(memory, RINGS * self.port, SIZE);
        self.tx = DriverQueue::new(memory, RINGS * self.port + 1, SIZE);
        self.control = DriverQueue::new(memory, RINGS * self.port + CONTROL, 64);
        self.buffers.clear();
        (self.provided, self.sent) = (0, 0);
    }

    /// Makes `count` receive buffers of `len` bytes available, without a doorbell.
    pub(super) fn provide(&mut self, count: u64, len: u32) {
        for _ in 0..count {
            let at = self.area() + TO_RECEIVE + self.provided % u64::from(SIZE) * 4096 * 4;
            self.provided += 1;
            let head = self.rx.add(&[(at, len, WRITE)]);
            self.buffers.insert(head.into(), at);
        }
    }

    /// Overwrites all receive buffers that are known.
    pub(super) fn wipe(&self) {
        self.buffers.values().for_each(|at| self.rx.memory_write(*at, &[0xaa; 64]));
    }

    /// True if no frame was written to them since.
    pub(super) fn is_wiped(&self) -> bool {
        self.buffers.values().all(|at| self.rx.bytes(*at, 64) == [0xaa; 64])
    }

    /// The frames since the last call, with their headers, each from one or more buffers.
    pub(super) fn received_raw(&mut self) -> Vec<Vec<u8>> {
        let mut used = self.rx.take_used().into_iter();
        let mut frames = Vec::new();
        while let Some((head, len)) = used.next() {
            let mut frame = self.rx.bytes(self.buffers[&head], len as usize);
            if len < 12 {
                continue;
            }
            let more = u16::from_le_bytes([frame[10], frame[11]]);
            for _ in 1..more {
                let (head, len) = used.next().expect("all buffers of a frame at once");
                frame.extend(self.rx.bytes(self.buffers[&head], len as usize));
            }
            frames.push(frame);
        }
        frames
    }

    /// The frames since the last call, without headers. Provides as many buffers again.
    pub(super) fn received(&mut self) -> Vec<Vec<u8>> {
        let frames: Vec<_> = self.received_raw().into_iter().map(|frame| frame[12..].to_vec()).collect();
        self.provide(frames.len() as u64, 2048);
        frames
    }

    /// Makes a frame with a header available, in pieces, without a doorbell.
    pub(super) fn queue_raw(&mut self, data: &[u8], pieces: &[usize]) {
        let at = self.area() + TO_SEND + self.sent % u64::from(SIZE / 4) * (1 << 16);
        self.sent += 1;
        self.tx.send(at, data, pieces);
    }

    /// The same, with a header without offloads.
    pub(super) fn queue(&mut self, frame: &[u8]) {
        self.queue_raw(&[&[0; 12], frame].concat(), &[12]);
    }

    /// Waits until this many frames have been handled.
    pub(super) fn wait_sent(&mut self, count: usize) {
        let mut done = 0;
        let tx = &mut self.tx;
        eventually("the frames to be sent", || {
            done += tx.take_used().len();
            done >= count
        });
    }

    /// Sends a frame, and waits until it has been handled and delivered.
    pub(super) fn send(&mut self, frame: &[u8]) {
        self.queue(frame);
        self.kick();
        self.wait_sent(1);
    }

    /// Sends a command, and returns its answer.
    pub(super) fn command(&mut self, command: &[u8]) -> u8 {
        let at = self.area() + AREA - (1 << 16);
        self.control.write(at - 1, [0xee]);
        self.control.memory_write(at, command);
        self.control.add(&[(at, command.len() as u32, 0), (at - 1, 1, WRITE)]);
        self.kick();
        let control = &mut self.control;
        eventually("an answer", || !control.take_used().is_empty());
        control.bytes(at - 1, 1)[0]
    }

    pub(super) fn set_promiscuous(&mut self, on: bool) {
        let command = [VIRTIO_NET_CTRL_RX as u8, VIRTIO_NET_CTRL_RX_PROMISC as u8, u8::from(on)];
        assert_eq!(self.command(&command), 0);
    }

    /// Sets the driver's tables.
    pub(super) fn set_tables(&mut self, unicast: &[[u8; 6]], multicast: &[[u8; 6]]) {
        let mut command = vec![VIRTIO_NET_CTRL_MAC as u8, VIRTIO_NET_CTRL_MAC_TABLE_SET as u8];
        for table in [unicast, multicast] {
            command.extend((table.len() as u32).to_le_bytes());
            command.extend(table.concat());
        }
        assert_eq!(self.command(&command), 0);
    }

    /// Queues commands that set its table of addresses, as many as the control queue has room for, without waiting for
    /// an answer.
    pub(super) fn queue_tables(&mut self, unicast: &[[u8; 6]]) {
        let at = self.area() + AREA - (1 << 16);
        let class = [VIRTIO_NET_CTRL_MAC as u8, VIRTIO_NET_CTRL_MAC_TABLE_SET as u8];
        let command =
            [&class[..], &(unicast.len() as u32).to_le_bytes(), &unicast.concat(), &0_u32.to_le_bytes()].concat();
        self.control.memory_write(at, &command);
        self.control.take_used();
        // Each takes two of the queue's descriptors.
        while self.control.outstanding() < 32 {
            self.control.add(&[(at, command.len() as u32, 0), (at - 1, 1, WRITE)]);
        }
        self.kick();
    }

    pub(super) fn set_policy(&mut self, policy: Policy) {
        self.net.set_policy(policy, RateLimits::default()).wait().unwrap();
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        self.stop();
    }
}
