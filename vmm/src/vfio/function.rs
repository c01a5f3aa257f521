//! A host device as a PCI function of the guest.
//!
//! An access to its configuration space, or to a BAR that is not mapped, is a system call on the vCPU's thread, under
//! the device's lock. Only the guest waits for its device, as on hardware.

mod interrupts;
mod regions;
pub(super) mod watch;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use pci::spec::{ALL_ONES, header};
use pci::{
    BarIndex, Device, Dword, DwordWrite, Effects, MsixStructure, Reach, ResetKind, Rid, VfIndex, Window, WindowId,
};
use vfio_bindings::bindings::vfio::VFIO_PCI_CONFIG_REGION_INDEX;
use virtio_devices::{
    CounterText, DeviceState, Inspect, IommuAttachment, Lifecycle, MemoryArea, MemoryPeers, MemoryUser, Message,
    Outcome, Pin, Signals, StateError, Thread,
};

use crate::arch::x86_64::layout;
use crate::vfio::config_space::{ConfigError, ConfigSpace};
use crate::vfio::function::interrupts::{Interrupts, has_pin};
use crate::vfio::function::regions::areas;
use crate::vfio::function::watch::Watched;
use crate::vfio::host_device::HostDevice;
use crate::vfio::kernel::info::DeviceInfo;
use crate::vfio::memory::follower::Follower;
use crate::vfio::seldom::counted;

/// The region of configuration space.
const CONFIG: usize = VFIO_PCI_CONFIG_REGION_INDEX as usize;
/// The most vectors that MSI can have.
const MOST_MSI: u16 = 32;

/// Descriptions of the counters of a host device. The last is that of its [follower](crate::vfio::memory::follower).
pub(crate) const TEXTS: [CounterText; 5] = [
    text("exits", "accesses", false, "Accesses to BARs that left the guest, because the host cannot map them."),
    text("resets", "resets", false, "Resets by the guest, by a reboot, and before the first use of the device."),
    text("reset_failures", "resets", true, "Resets that the host refused or could not finish."),
    text("interrupt_failures", "interrupts", true, "Interrupts that the host did not provide to the device."),
    text("map_failures", "ranges", true, "Ranges of guest memory that the host did not map for the device."),
];

const fn text(name: &'static str, unit: &'static str, is_loss: bool, text: &'static str) -> CounterText {
    CounterText { name, unit, is_loss, text }
}

/// Counters of a host device.
#[derive(Debug, Default)]
pub(crate) struct VfioCounters {
    /// Accesses to BARs that left the guest.
    exits: AtomicU64,
    /// Resets by the guest, by a reboot, and before its first use.
    resets: AtomicU64,
    /// Resets that failed.
    reset_failures: AtomicU64,
    /// Interrupts that the host did not give.
    interrupt_failures: AtomicU64,
}

impl VfioCounters {
    /// All of them, by name.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let all = [&self.exits, &self.resets, &self.reset_failures, &self.interrupt_failures];
        TEXTS.iter().zip(all).map(|(text, counter)| (text.name, counter.load(Ordering::Relaxed))).collect()
    }
}

/// Objects that live as long as the function.
pub(super) struct Guards {
    // Drop order: the function is detached from the virtual IOMMU first.
    /// Endpoint behind the guest's virtual IOMMU.
    pub _attachment: Option<IommuAttachment>,
    /// Registration of its watcher.
    pub _watched: Watched,
    /// Mark that the device is open.
    pub _mark: Arc<()>,
    /// Follower of the virtual IOMMU.
    pub follower: Option<Arc<Follower>>,
}

/// A host device as a function of the guest.
pub(crate) struct VfioFunction {
    rid: Rid,
    config: ConfigSpace,
    interrupts: Interrupts,
    // Drop order: a mapping keeps the device open.
    areas: Vec<MemoryArea>,
    kept: Option<Guards>,
    host: Box<dyn HostDevice>,
    resets: bool,
    counters: Arc<VfioCounters>,
}

impl VfioFunction {
    /// A function at `rid` for the device `host`, which `info` describes. BARs in `unmapped` are reached only through
    /// exits. With `peers`, other devices reach what the guest reaches without exits. Resets the device if possible.
    ///
    /// # Errors
    ///
    /// Fails if the shape of the function is impossible.
    pub(super) fn new(
        rid: Rid,
        host: Box<dyn HostDevice>,
        info: &DeviceInfo,
        unmapped: &[u8],
        peers: Option<&Arc<dyn MemoryPeers>>,
    ) -> Result<Self, ConfigError> {
        let len = info.regions.get(CONFIG).map_or(0, |region| region.size.min(0x1000));
        let mut image = vec![0; usize::try_from(len).unwrap_or(0)];
        for (offset, dword) in (0..).step_by(4).zip(image.chunks_exact_mut(4)) {
            host.read(CONFIG, offset, dword);
        }
        let mut sizes = [0; 6];
        sizes.iter_mut().zip(&info.regions).for_each(|(size, region)| *size = region.size);
        let line = has_pin(info).then(|| layout::pin_gsi(rid.device()));
        let config = ConfigSpace::new(&image, sizes, info.resets, line)?;
        let msix = config.msix().map_or(0, pci::Msix::vectors);
        let interrupts = Interrupts::new(info, msix.max(if config.msi().is_some() { MOST_MSI } else { 0 }));
        let areas = map(&config, host.as_ref(), info, unmapped, peers);
        let (counters, resets) = (Arc::default(), info.resets);
        let mut this = Self { rid, config, interrupts, areas, kept: None, host, resets, counters };
        if !this.resets {
            log::warn!("{rid}: a device of the host that cannot be reset; it may remember what others did with it");
        }
        this.reset_host();
        this.update_interrupts();
        Ok(this)
    }

    /// Stores the objects that must live as long.
    pub(super) fn keeping(mut self, kept: Guards) -> Self {
        self.kept = Some(kept);
        self
    }

    /// Reader of its counters, by name.
    pub(crate) fn counters(&self) -> impl Fn() -> Vec<(&'static str, u64)> + Send + 'static {
        let (counters, kept) = (Arc::clone(&self.counters), self.kept.as_ref());
        let follower = kept.and_then(|kept| kept.follower.as_ref()).map(Arc::downgrade);
        move || {
            let refused = follower.as_ref().and_then(Weak::upgrade).map(|follower| (TEXTS[4].name, follower.refused()));
            counters.counters().into_iter().chain(refused).collect()
        }
    }

    fn host_dword(&self, reg: Dword) -> u32 {
        let mut data = [0; 4];
        self.host.read(CONFIG, reg.offset().into(), &mut data);
        u32::from_le_bytes(data)
    }

    fn set_host_command(&self) {
        let command = self.config.host_command().to_le_bytes();
        self.host.write(CONFIG, header::COMMAND_STATUS.into(), &command);
    }

    /// Resets the device, whose registers here are reset already: afterwards it neither signals nor accesses memory.
    fn reset_host(&mut self) {
        self.note_interrupts("turn its interrupts off", |interrupts, _, host| interrupts.off(host));
        self.interrupts.forget();
        // Set before the reset, in case the device has none, and after it, which may have changed Command.
        self.set_host_command();
        if self.resets {
            self.counters.resets.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = self.host.reset()
                && counted(&self.counters.reset_failures)
            {
                log::warn!("{}: cannot reset a device of the host: {error}", self.rid);
            }
            self.set_host_command();
        }
    }

    fn update_interrupts(&mut self) {
        self.note_interrupts("get interrupts", Interrupts::update);
    }

    fn note_interrupts(
        &mut self,
        action: &str,
        change: impl FnOnce(&mut Interrupts, &ConfigSpace, &dyn HostDevice) -> io::Result<()>,
    ) {
        if let Err(error) = change(&mut self.interrupts, &self.config, self.host.as_ref())
            && counted(&self.counters.interrupt_failures)
        {
            log::warn!("{}: a device of the host: cannot {action}: {error}", self.rid);
        }
    }

    /// Applies the effects of changed registers to the host device.
    fn follow(&mut self, mut effects: Effects) -> Outcome {
        if effects.messages {
            self.update_interrupts();
        }
        effects.reset = None;
        Outcome::from(effects).within(Reach::Function(self.rid))
    }

    /// The message of `vector`, if it may be sent.
    fn message(&self, vector: u16) -> Option<(u64, u32)> {
        let msix = self.config.msix().filter(|msix| msix.enabled());
        let msi = self.config.msi().filter(|_| msix.is_none());
        let message = msix.map_or_else(|| msi?.message(vector), |msix| msix.message(vector));
        message.filter(|_| self.may_send(self.rid))
    }

    /// True if `vector` is pending.
    fn is_pending(&self, vector: u16) -> bool {
        self.message(vector).is_none() && self.interrupts.is_signalled(vector)
    }
}

/// Maps the parts of the BARs that the guest can access without exits. The rest is reached through exits.
fn map(
    config: &ConfigSpace,
    host: &dyn HostDevice,
    info: &DeviceInfo,
    unmapped: &[u8],
    peers: Option<&Arc<dyn MemoryPeers>>,
) -> Vec<MemoryArea> {
    let mut mapped = Vec::new();
    for (index, region) in BarIndex::ALL.into_iter().zip(&info.regions) {
        if unmapped.contains(&index.get()) {
            continue;
        }
        let kept: Vec<_> = config
            .msix()
            .into_iter()
            .flat_map(|msix| {
                let ranges = MsixStructure::ALL.map(|structure| msix.shape().range(structure));
                ranges.into_iter().filter_map(|(bar, range)| (bar == index).then_some(range))
            })
            .collect();
        for area in areas(region, &kept) {
            let number = usize::from(index.get());
            match host.map(number, area.start, area.end - area.start) {
                Ok(memory) => {
                    let (window, memory) = (WindowId::Bar(index), Arc::new(memory));
                    mapped.push(MemoryArea { window, offset: area.start, memory, peers: peers.cloned() });
                }
                Err(error) => {
                    log::warn!("BAR {index} of a device of the host is slow, as it cannot be mapped: {error}")
                }
            }
        }
    }
    mapped
}

impl Device for VfioFunction {
    type Stopping = Thread;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        if rid != self.rid {
            return ALL_ONES;
        }
        let (own, of_host) = self.config.read(reg, |vector| self.is_pending(vector));
        if of_host == 0 { own } else { own | self.host_dword(reg) & of_host }
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome {
        if rid != self.rid {
            return Outcome::none();
        }
        let written = self.config.write(reg, write);
        if let Some(through) = written.through {
            let old = self.host_dword(through.reg());
            for write in through.writes(old) {
                self.host.write(CONFIG, write.offset.into(), write.data());
            }
        }
        if written.command {
            self.set_host_command();
        }
        if written.flr {
            self.reset_host();
        }
        self.follow(written.effects)
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        let WindowId::Bar(bar) = window else { return data.fill(0xff) };
        self.counters.exits.fetch_add(1, Ordering::Relaxed);
        let raised = |vector| self.interrupts.is_signalled(vector);
        let may_send = self.may_send(self.rid);
        if !self.config.msix().is_some_and(|msix| msix.bar_read(bar, offset, data, may_send, raised)) {
            self.host.read(bar.get().into(), offset, data);
        }
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Outcome {
        let WindowId::Bar(bar) = window else { return Outcome::none() };
        self.counters.exits.fetch_add(1, Ordering::Relaxed);
        match self.config.msix_mut().and_then(|msix| msix.bar_write(bar, offset, data)) {
            Some(effects) => self.follow(effects),
            None => {
                self.host.write(bar.get().into(), offset, data);
                Outcome::none()
            }
        }
    }

    fn may_send(&self, rid: Rid) -> bool {
        rid == self.rid && self.config.bus_master()
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.config.windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Outcome {
        let effects = self.config.reset(kind);
        self.reset_host();
        self.follow(effects)
    }
}

impl Signals for VfioFunction {
    fn messages(&self, reach: Reach, out: &mut Vec<Message>) {
        if reach != Reach::Device && reach != Reach::Function(self.rid) {
            return;
        }
        let vectors = self.config.msix().map_or(0, pci::Msix::vectors).max(MOST_MSI);
        out.extend((0..vectors).filter_map(|vector| {
            let (address, data) = self.message(vector)?;
            let eventfd = Arc::clone(self.interrupts.eventfd(vector)?);
            Some(Message { requester: self.rid, address, data, eventfd })
        }));
    }

    fn pin(&self) -> Option<Pin> {
        self.interrupts.pin().filter(|_| self.config.is_d0()).cloned()
    }

    fn memory(&self, out: &mut Vec<MemoryArea>) {
        out.extend(self.areas.iter().cloned());
    }
}

impl Inspect for VfioFunction {
    /// Always false: the device changes its registers itself.
    fn config_is_static(&self, _rid: Rid) -> bool {
        false
    }

    /// Adds nothing: the guest memory that it reaches belongs to its address space, which several devices share.
    fn memory_users(&self, _out: &mut Vec<(Option<VfIndex>, MemoryUser)>) {}
}

/// Hardware does not pause: a device that its guest has set up may access memory and signal while vCPUs are paused.
impl Lifecycle for VfioFunction {
    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        Err(StateError::OfHost)
    }

    fn restore(&mut self, _state: &DeviceState) -> Result<(), StateError> {
        Err(StateError::OfHost)
    }
}

impl Drop for VfioFunction {
    fn drop(&mut self) {
        // The kernel turns off the rest when it closes the device.
        self.areas.clear();
        self.kept = None;
    }
}

#[cfg(test)]
mod tests;
