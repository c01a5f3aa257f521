//! The interrupts of a host device: the requests to the host follow the guest's MSI-X or MSI registers. If neither is
//! enabled, a device with a pin interrupts through that.
//!
//! Each vector has an eventfd, which the host signals and the slot wires to the VM. The host gets it when the vector is
//! unmasked for the first time: a driver has many more vectors than it uses, and those of the host are scarce. After
//! that only the slot handles masking and unmasking, and a masked vector's pending bit is its eventfd.
//!
//! The pin's level is two eventfds. The host masks the pin when it signals the first, and unmasks it when the second is
//! signalled, which KVM does when the guest ends the interrupt; if the device still asserts its pin then, the host
//! signals the first again. No thread of this process is involved.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_AUTOMASKED, VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_MASKABLE, VFIO_IRQ_INFO_NORESIZE,
    VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
};
use virtio_devices::{Pin, borrow_eventfd};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::vfio::config_space::ConfigSpace;
use crate::vfio::host_device::HostDevice;
use crate::vfio::kernel::info::DeviceInfo;

/// Abilities that the host's side of a pin must have.
const PIN: u32 = VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_MASKABLE | VFIO_IRQ_INFO_AUTOMASKED;

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Requests to the host.
#[derive(Debug)]
struct HostRequest {
    /// The pin, MSI or MSI-X, by VFIO's number.
    index: u32,
    /// The vectors that the host has reserved, from 0.
    reserved: u16,
    /// Vectors whose eventfds the host has.
    given: BTreeSet<u16>,
}

/// True if the device described by `info` has a pin whose level can be passed to a guest. The kernel reports none for a
/// VF, and for a device without an interrupt line on the host.
pub(crate) fn has_pin(info: &DeviceInfo) -> bool {
    let pin = info.irqs.get(VFIO_PCI_INTX_IRQ_INDEX as usize);
    pin.is_some_and(|irq| irq.count > 0 && irq.flags & PIN == PIN)
}

fn eventfd() -> io::Result<Arc<EventFd>> {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map(Arc::new)
}

/// The interrupts of a function.
#[derive(Debug)]
pub(crate) struct Interrupts {
    /// Eventfds by vector, for those used since a reset.
    eventfds: Vec<Option<Arc<EventFd>>>,
    asked: Option<HostRequest>,
    /// The pin, while the host signals it.
    pin: Option<Pin>,
    /// True if the host can reserve more MSI-X vectors while some are in use (Linux 6.5).
    grows: bool,
}

impl Interrupts {
    /// The interrupts, all off, of a device that `info` describes, with at most `vectors` of MSI-X or MSI.
    pub(crate) fn new(info: &DeviceInfo, vectors: u16) -> Self {
        let flags = info.irqs.get(VFIO_PCI_MSIX_IRQ_INDEX as usize).map_or(0, |irq| irq.flags);
        let eventfds = (0..vectors).map(|_| None).collect();
        Self { eventfds, asked: None, pin: None, grows: flags & VFIO_IRQ_INFO_NORESIZE == 0 }
    }

    /// The eventfd of `vector`, if the host has it.
    pub(crate) fn eventfd(&self, vector: u16) -> Option<&Arc<EventFd>> {
        self.eventfds.get(usize::from(vector))?.as_ref()
    }

    /// The pin, while the device uses it.
    pub(crate) fn pin(&self) -> Option<&Pin> {
        self.pin.as_ref()
    }

    /// True if `vector` has a signal that was not consumed.
    pub(crate) fn is_signalled(&self, vector: u16) -> bool {
        let Some(eventfd) = self.eventfd(vector) else { return false };
        let mut fds = [PollFd::from_borrowed_fd(borrow_eventfd(eventfd), PollFlags::IN)];
        poll(&mut fds, Some(&AT_ONCE)).is_ok_and(|ready| ready > 0)
    }

    /// Requests from `host` the interrupts that `config` enables.
    ///
    /// # Errors
    ///
    /// Fails if the host has no vector or file descriptor left. The next update requests the missing ones again.
    pub(crate) fn update(&mut self, config: &ConfigSpace, host: &dyn HostDevice) -> io::Result<()> {
        let msix = config.msix().filter(|msix| msix.enabled());
        let msi = config.msi().filter(|msi| msi.enabled());
        let (index, wanted): (_, BTreeSet<u16>) = match (msix, msi) {
            (Some(msix), _) => {
                let unmasked = (0..msix.vectors()).filter(|vector| msix.message(*vector).is_some());
                (VFIO_PCI_MSIX_IRQ_INDEX, unmasked.collect())
            }
            // MSI vectors can only be enabled all at once.
            (None, Some(msi)) => (VFIO_PCI_MSI_IRQ_INDEX, (0..msi.vectors()).collect()),
            (None, None) if config.uses_pin() => return self.use_pin(host),
            (None, None) => return self.off(host),
        };
        let is_msi = index == VFIO_PCI_MSI_IRQ_INDEX;
        if self.asked.as_ref().is_some_and(|asked| asked.index != index || is_msi && asked.given != wanted) {
            self.off(host)?;
        }
        let given = self.asked.as_ref().map(|asked| asked.given.clone()).unwrap_or_default();
        let missing: BTreeSet<_> = wanted.difference(&given).copied().collect();
        let Some(last) = missing.last() else { return Ok(()) };
        missing.iter().try_for_each(|vector| self.make(*vector))?;
        let reserved = self.asked.as_ref().map_or(0, |asked| asked.reserved);
        if reserved > 0 && (self.grows || *last < reserved) {
            return missing.iter().try_for_each(|vector| self.give(*vector, host));
        }
        if reserved > 0 {
            // Vectors in use are freed, and requested again with the others. Pending signals stay in their eventfds.
            host.clear_irqs(index)?;
            self.asked = None;
        }
        self.begin(index, &given.union(&missing).copied().collect(), host)
    }

    /// Turns off all interrupts.
    pub(crate) fn off(&mut self, host: &dyn HostDevice) -> io::Result<()> {
        self.pin = None;
        self.asked.take().map_or(Ok(()), |asked| host.clear_irqs(asked.index))
    }

    /// Discards all signals, after a reset.
    pub(crate) fn forget(&mut self) {
        self.eventfds.fill(None);
    }

    fn use_pin(&mut self, host: &dyn HostDevice) -> io::Result<()> {
        if self.pin.is_some() {
            return Ok(());
        }
        self.off(host)?;
        let (index, pin) = (VFIO_PCI_INTX_IRQ_INDEX, Pin { trigger: eventfd()?, resample: eventfd()? });
        host.set_irqs(index, 0, &[Some(Arc::clone(&pin.trigger))])?;
        self.asked = Some(HostRequest { index, reserved: 1, given: BTreeSet::from([0]) });
        // Without unmasking, the pin would interrupt only once.
        if let Err(error) = host.set_unmask(index, &pin.resample) {
            self.off(host)?;
            return Err(error);
        }
        self.pin = Some(pin);
        Ok(())
    }

    fn make(&mut self, vector: u16) -> io::Result<()> {
        if let Some(eventfd @ None) = self.eventfds.get_mut(usize::from(vector)) {
            *eventfd = Some(self::eventfd()?);
        }
        Ok(())
    }

    /// Adds one vector on the host.
    fn give(&mut self, vector: u16, host: &dyn HostDevice) -> io::Result<()> {
        let eventfd = self.eventfd(vector).cloned();
        let Some(asked) = &mut self.asked else { return Ok(()) };
        host.set_irqs(asked.index, vector.into(), &[eventfd])?;
        asked.given.insert(vector);
        asked.reserved = asked.reserved.max(vector.saturating_add(1));
        Ok(())
    }

    /// Requests the first vectors from the host.
    fn begin(&mut self, index: u32, vectors: &BTreeSet<u16>, host: &dyn HostDevice) -> io::Result<()> {
        let reserved = vectors.last().map_or(0, |last| last.saturating_add(1));
        let eventfd = |vector| self.eventfd(vector).filter(|_| vectors.contains(&vector)).cloned();
        let eventfds: Vec<_> = (0..reserved).map(eventfd).collect();
        host.set_irqs(index, 0, &eventfds)?;
        self.asked = Some(HostRequest { index, reserved, given: vectors.clone() });
        Ok(())
    }
}
