//! A device without a backend and a driver without a guest, for tests, property tests and fuzz targets.

#[allow(clippy::unwrap_used, reason = "a driver that a test has set up wrongly fails the test")]
pub mod driver_queue;
#[cfg(test)]
pub(crate) mod guest;
mod hosted;
mod nic;

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pci::{Access, BarIndex, Device, Rid, WindowId};
use virtio_queue::QueueT;
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

pub use self::hosted::Hosted;
pub use self::nic::nic;
pub use crate::backend::VhostUserSteps;
pub use crate::block::image::qcow2::steps::Qcow2Steps;
pub use crate::block::steps::{BlockQueue, BlockSteps};
pub use crate::console::steps::ConsoleSteps;
use crate::device::config::{ConfigField, Rule, read};
pub use crate::device::queue_worker::steps::SteppedQueue;
use crate::device::worker::own;
pub use crate::frames::policy::steps::{PolicyStep, never_replaced, police_received, police_sent};
pub use crate::guest_channel::steps::ChannelSteps;
pub use crate::iommu::steps::{IommuQueue, IommuSteps};
pub use crate::memory_devices::balloon::steps::BalloonSteps;
pub use crate::memory_devices::mem::steps::MemSteps;
pub use crate::net::steps::{NetSteps, Step, StepQueue, Stepped};
use crate::os::thread::NewThread;
pub use crate::rng::steps::RngSteps;
pub use crate::switch::steps::{StepsError, SwitchSteps};
pub use crate::vsock::steps::VsockSteps;
use crate::{
    DeviceSpecific, DoorbellPages, GuestMap, Interrupts, Memory, SharedQueue, Start, StateError, VirtioDevice, Worker,
};

/// A device-specific feature of [`FakeDevice`].
pub const FAKE_FEATURE: u64 = 1 << 5;

/// 1 MiB of guest memory at address 0; empty if it cannot be allocated.
pub fn memory() -> Memory {
    let map = GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]);
    Memory::new(map.unwrap_or_else(|_| GuestMap::new()))
}

/// Counters of the workers of a [`FakeDevice`].
#[derive(Debug, Default)]
pub struct Counters {
    /// Number of wake-ups: a doorbell that is rung twice before its worker wakes is one kick.
    pub kicks: AtomicUsize,
    /// Number of wake-ups: a doorbell that is rung twice before its worker wakes is one kick.
    pub rings: AtomicUsize,
    /// Workers that hold their queues now.
    pub workers: AtomicUsize,
}

/// A device that records the calls of its transport.
#[derive(Debug)]
pub struct FakeDevice {
    queue_sizes: Vec<u16>,
    threads: bool,
    /// Number of starts.
    pub starts: usize,
    /// Number of resets.
    pub resets: usize,
    /// Number of ends of the guest's settings.
    pub guest_settings_ended: usize,
    /// The features and the queues of the last start.
    pub started: Option<(u64, Vec<u16>)>,
    /// The queues of the last start.
    pub queues: Vec<(u16, SharedQueue)>,
    /// Interrupts of the last start.
    pub interrupts: Option<Arc<Interrupts>>,
    /// The next starts fail.
    pub refuse: bool,
    /// The device configuration, which the driver may write.
    pub config: [u8; 8],
    /// Counters of its workers.
    pub counters: Arc<Counters>,
    /// The doorbells that its guest may map as pages.
    pub pages: Option<DoorbellPages>,
}

impl FakeDevice {
    /// A network device that runs no thread.
    pub fn new(queue_sizes: &[u16]) -> Self {
        Self {
            queue_sizes: queue_sizes.into(),
            threads: false,
            starts: 0,
            resets: 0,
            started: None,
            queues: Vec::new(),
            interrupts: None,
            guest_settings_ended: 0,
            refuse: false,
            config: [0; 8],
            counters: Arc::default(),
            pages: None,
        }
    }

    /// The same with one worker for all queues. At each kick it takes one buffer from each queue, by advancing the
    /// position, and signals the queue.
    pub fn with_worker(queue_sizes: &[u16]) -> Self {
        Self { threads: true, ..Self::new(queue_sizes) }
    }

    fn worker(&self, start: Start) -> io::Result<Worker> {
        let kick = Arc::new(EventFd::new(0)?);
        let stop = Arc::new(AtomicBool::new(false));
        let queues: Vec<_> = start.queues.iter().map(|(index, _)| *index).collect();
        let thread = NewThread::new("fake", 64 << 10, {
            let (kick, stop, counters) = (Arc::clone(&kick), Arc::clone(&stop), Arc::clone(&self.counters));
            move || run(&start.queues, &start.interrupts, &kick, &stop, &counters)
        })
        .start()?;
        Ok(Worker::new(queues, kick, stop, thread))
    }
}

fn run(queues: &[(u16, SharedQueue)], interrupts: &Interrupts, kick: &EventFd, stop: &AtomicBool, counters: &Counters) {
    let owned = queues.iter().map(|(index, queue)| own(queue, stop).map(|queue| (*index, queue)));
    let Some(mut queues) = owned.collect::<Option<Vec<_>>>() else { return };
    counters.workers.fetch_add(1, Ordering::AcqRel);
    let heard = || kick.read().inspect(|rings| _ = counters.rings.fetch_add(*rings as usize, Ordering::AcqRel)).is_ok();
    while heard() && !stop.load(Ordering::Acquire) {
        for (index, queue) in &mut queues {
            let next = queue.next_avail();
            queue.set_next_avail(next.wrapping_add(1));
            interrupts.signal_queue(*index);
        }
        counters.kicks.fetch_add(1, Ordering::AcqRel);
    }
    counters.workers.fetch_sub(1, Ordering::AcqRel);
}

impl VirtioDevice for FakeDevice {
    fn device_type(&self) -> u16 {
        1
    }

    fn class(&self) -> [u8; 3] {
        [0x02, 0, 0]
    }

    fn features(&self) -> u64 {
        FAKE_FEATURE
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn doorbell_pages(&self) -> Option<&DoorbellPages> {
        self.pages.as_ref()
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        const { &[ConfigField::new("word", 0, 8, Rule::Saved)] }
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        read(&self.config, offset, data);
    }

    fn config_write(&mut self, offset: u64, data: &[u8]) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        self.config.iter_mut().skip(offset).zip(data).for_each(|(to, from)| *to = *from);
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        if self.refuse {
            return Err(io::Error::other("refused"));
        }
        self.starts += 1;
        self.started = Some((start.features, start.queues.iter().map(|(index, _)| *index).collect()));
        self.queues.clone_from(&start.queues);
        self.interrupts = Some(Arc::clone(&start.interrupts));
        if self.threads { Ok(vec![self.worker(start)?]) } else { Ok(Vec::new()) }
    }

    fn end_guest_settings(&mut self) {
        self.guest_settings_ended += 1;
    }

    fn reset(&mut self) {
        self.resets += 1;
        self.started = None;
        self.queues.clear();
        self.interrupts = None;
        self.config = [0; 8];
    }

    fn save(&self) -> DeviceSpecific {
        if self.config == [0; 8] { DeviceSpecific::PowerOn } else { DeviceSpecific::Config(self.config.to_vec()) }
    }

    fn restore(&mut self, state: &DeviceSpecific, _started: Option<u64>) -> Result<(), StateError> {
        self.config = match state {
            DeviceSpecific::PowerOn => [0; 8],
            DeviceSpecific::Config(config) => {
                config.as_slice().try_into().map_err(|_| StateError::Shape("configuration lengths"))?
            }
            _ => return Err(StateError::Shape("kinds of device")),
        };
        Ok(())
    }
}

/// A driver's access path to a function's registers.
#[derive(Debug, Clone, Copy)]
enum Path {
    /// Through its memory window, from this offset.
    Memory(u64),
    /// Through the PCI configuration access capability at this offset.
    Config(u64),
}

/// A structure named by a virtio capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Structure {
    /// The capability's offset in configuration space.
    pub capability: u64,
    /// The BAR.
    pub bar: u8,
    /// The offset in the BAR.
    pub offset: u32,
    /// The number of bytes.
    pub length: u32,
}

/// A driver of one function of `device`.
pub struct Driver<'d, D: ?Sized> {
    /// The device.
    pub device: &'d mut D,
    rid: Rid,
    vf: bool,
    path: Path,
}

impl<'d, D: Device<Stopping = Infallible> + ?Sized> Driver<'d, D> {
    /// The driver of a plain function or a PF.
    pub fn new(device: &'d mut D, rid: Rid) -> Self {
        Self { device, rid, vf: false, path: Path::Memory(0) }
    }

    /// The driver of a VF whose slice of each VF BAR begins at `base`.
    pub fn of_vf(device: &'d mut D, rid: Rid, base: u64) -> Self {
        Self { device, rid, vf: true, path: Path::Memory(base) }
    }

    /// Makes the driver use the BARs through configuration space.
    #[must_use]
    pub fn without_memory(mut self) -> Self {
        self.path = Path::Config(self.structure(5).map_or(0, |structure| structure.capability));
        self
    }

    /// Reads `len` bytes, 1, 2 or 4, of configuration space.
    pub fn config_read(&self, offset: u64, len: usize) -> u32 {
        let mut data = [0; 4];
        if let Some(access) = Access::decode(offset, len) {
            access.extract(self.device.config_read(self.rid, access.dword()), data.get_mut(..len).unwrap_or_default());
        }
        u32::from_le_bytes(data)
    }

    /// Writes the lowest `len` bytes, 1, 2 or 4, of `value` to configuration space.
    pub fn config_write(&mut self, offset: u64, len: usize, value: u32) -> pci::Effects {
        match Access::decode(offset, len) {
            Some(access) => {
                self.device.config_write(self.rid, access.dword(), access.write(&value.to_le_bytes())).effects
            }
            None => pci::Effects::NONE,
        }
    }

    /// The offset of the first capability with this ID for which `found` holds.
    pub fn capability(&self, id: u32, found: impl Fn(u64) -> bool) -> Option<u64> {
        let mut offset = u64::from(self.config_read(0x34, 1));
        // There is room for 48.
        for _ in 0..48 {
            if offset == 0 {
                return None;
            }
            if self.config_read(offset, 1) == id && found(offset) {
                return Some(offset);
            }
            offset = u64::from(self.config_read(offset + 1, 1));
        }
        None
    }

    /// The structure of type `cfg_type` (`virtio 1.4 §4.1.4`).
    pub fn structure(&self, cfg_type: u32) -> Option<Structure> {
        let capability = self.capability(0x09, |offset| self.config_read(offset + 3, 1) == cfg_type)?;
        let [bar, ..] = self.config_read(capability + 4, 1).to_le_bytes();
        let (offset, length) = (self.config_read(capability + 8, 4), self.config_read(capability + 12, 4));
        Some(Structure { capability, bar, offset, length })
    }

    fn window(&self, bar: BarIndex) -> WindowId {
        if self.vf { WindowId::VfBar(bar) } else { WindowId::Bar(bar) }
    }

    /// Reads `len` bytes, 1, 2 or 4, at `offset` of BAR `bar`.
    pub fn bar_read(&mut self, bar: u8, offset: u64, len: usize) -> u32 {
        let mut data = [0; 4];
        match (self.path, BarIndex::new(bar)) {
            (Path::Memory(base), Ok(index)) => {
                let window = self.window(index);
                self.device.mmio_read(window, base + offset, data.get_mut(..len).unwrap_or_default());
            }
            (Path::Config(capability), _) => {
                self.aim(capability, bar, offset, len);
                return self.config_read(capability + 16, len);
            }
            _ => {}
        }
        u32::from_le_bytes(data)
    }

    /// Writes the lowest `len` bytes, 1, 2 or 4, of `value` at `offset` of BAR `bar`.
    pub fn bar_write(&mut self, bar: u8, offset: u64, len: usize, value: u32) -> pci::Effects {
        match (self.path, BarIndex::new(bar)) {
            (Path::Memory(base), Ok(index)) => {
                let window = self.window(index);
                let data = value.to_le_bytes();
                self.device.mmio_write(window, base + offset, data.get(..len).unwrap_or_default()).effects
            }
            (Path::Config(capability), _) => {
                self.aim(capability, bar, offset, len);
                self.config_write(capability + 16, len, value)
            }
            _ => pci::Effects::NONE,
        }
    }

    fn aim(&mut self, capability: u64, bar: u8, offset: u64, len: usize) {
        let lower = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let _ = self.config_write(capability + 4, 1, bar.into());
        let _ = self.config_write(capability + 8, 4, lower(offset));
        let _ = self.config_write(capability + 12, 4, u32::try_from(len).unwrap_or(u32::MAX));
    }

    /// Reads `len` bytes of the common configuration.
    pub fn common_read(&mut self, offset: u64, len: usize) -> u32 {
        match self.structure(1) {
            Some(common) => self.bar_read(common.bar, u64::from(common.offset) + offset, len),
            None => u32::MAX,
        }
    }

    /// Writes `len` bytes of the common configuration.
    pub fn common_write(&mut self, offset: u64, len: usize, value: u32) -> pci::Effects {
        match self.structure(1) {
            Some(common) => self.bar_write(common.bar, u64::from(common.offset) + offset, len, value),
            None => pci::Effects::NONE,
        }
    }

    /// Reads the device status.
    pub fn status(&mut self) -> u32 {
        self.common_read(0x14, 1)
    }

    /// Writes the device status.
    pub fn set_status(&mut self, status: u32) -> pci::Effects {
        self.common_write(0x14, 1, status)
    }

    /// Sets or clears Bus Master Enable, with Memory Space Enable where the function has it.
    pub fn set_bus_master(&mut self, on: bool) -> pci::Effects {
        self.config_write(4, 2, if on { 6 } else { 2 })
    }

    /// Accepts all features, up to FEATURES_OK, and returns those.
    pub fn negotiate(&mut self) -> u64 {
        for status in [0, 1, 3] {
            let _ = self.set_status(status);
        }
        let mut features = 0;
        for word in [1, 0] {
            let _ = self.common_write(0x00, 4, word);
            let offered = self.common_read(0x04, 4);
            let _ = self.common_write(0x08, 4, word);
            let _ = self.common_write(0x0c, 4, offered);
            features = features << 32 | u64::from(offered);
        }
        let _ = self.set_status(11);
        features
    }

    /// Enables `queue` somewhere in memory, and maps it to `vector`.
    pub fn set_up_queue(&mut self, queue: u16, vector: u16) {
        let base = 0x1_0000 * u32::from(queue);
        let _ = self.common_write(0x16, 2, queue.into());
        let _ = self.common_write(0x1a, 2, vector.into());
        for (register, address) in [(0x20, base), (0x28, base + 0x8000), (0x30, base + 0xc000)] {
            let _ = self.common_write(register, 4, address);
            let _ = self.common_write(register + 4, 4, 0);
        }
        let _ = self.common_write(0x1c, 2, 1);
    }

    /// Initializes the device up to DRIVER_OK with all queues, each with its own vector after that of the
    /// configuration.
    pub fn init(&mut self) -> u32 {
        let _ = self.set_bus_master(true);
        self.negotiate();
        let _ = self.common_write(0x10, 2, 0);
        // A removed function, or one whose memory is disabled, reads all ones.
        let queues = u16::try_from(self.common_read(0x12, 2)).ok().filter(|queues| *queues != u16::MAX);
        for queue in 0..queues.unwrap_or(0) {
            self.set_up_queue(queue, queue + 1);
        }
        let _ = self.set_status(15);
        self.status()
    }

    /// Rings the doorbell of `queue`.
    pub fn notify(&mut self, queue: u16) -> pci::Effects {
        let _ = self.common_write(0x16, 2, queue.into());
        let notify_off = u64::from(self.common_read(0x1e, 2));
        let Some(notify) = self.structure(2) else { return pci::Effects::NONE };
        let multiplier = u64::from(self.config_read(notify.capability + 16, 4));
        self.bar_write(notify.bar, u64::from(notify.offset) + notify_off * multiplier, 2, queue.into())
    }

    /// Enables MSI-X with all `vectors` unmasked; vector n sends the data `0x40 + n`.
    pub fn enable_msix(&mut self, vectors: u16) {
        let Some(msix) = self.capability(0x11, |_| true) else { return };
        let table = self.config_read(msix + 4, 4);
        let [bar, ..] = (table & 7).to_le_bytes();
        for vector in 0..vectors {
            let entry = u64::from(table & !7) + u64::from(vector) * 16;
            for (offset, value) in [(0, 0xfee0_0000), (4, 0), (8, 0x40 + u32::from(vector)), (12, 0)] {
                let _ = self.bar_write(bar, entry + offset, 4, value);
            }
        }
        let _ = self.config_write(msix + 2, 2, 0x8000);
    }

    /// Sets Initiate Function Level Reset.
    pub fn flr(&mut self) -> pci::Effects {
        match self.capability(0x10, |_| true) {
            Some(pcie) => self.config_write(pcie + 8, 2, 0x8000),
            None => pci::Effects::NONE,
        }
    }
}
