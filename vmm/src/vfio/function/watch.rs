//! Notices of the host about passed-through devices: a request to release the device, or an error.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use vfio_bindings::bindings::vfio::{VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX};
use virtio_devices::borrow_eventfd;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::vfio::host_device::HostDevice;
use crate::vfio::kernel::info::DeviceInfo;

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Notices that are read at once; others wait.
const AT_MOST: usize = 16;

/// Notice of the host about a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The host requests the device back: to unbind its driver, or to remove it. The request is repeated.
    Requested,
    /// The device has reported an error that it cannot correct.
    Error,
}

impl Notice {
    /// Text for the log.
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Requested => "the host wants the device back; the guest is asked to release it",
            Self::Error => "the device has reported an error that it cannot correct",
        }
    }

    const ALL: [(Self, u32); 2] = [(Self::Requested, VFIO_PCI_REQ_IRQ_INDEX), (Self::Error, VFIO_PCI_ERR_IRQ_INDEX)];
}

/// The watched devices of a VM.
pub(crate) struct Watch {
    epoll: OwnedFd,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    next: u64,
    /// Entries by the number in epoll's events.
    by_number: BTreeMap<u64, Entry>,
}

struct Entry {
    id: String,
    notice: Notice,
    eventfd: Arc<EventFd>,
}

/// A device that is watched until this is dropped.
pub(crate) struct Watched {
    watch: Weak<Watch>,
    numbers: Vec<u64>,
}

impl Watch {
    /// Creates a watch without devices.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor is left.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)?, entries: Mutex::default() })
    }

    /// Watches the device `host`, which is described by `info` and called `id`.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor is left, or the kernel refuses.
    pub(crate) fn begin(self: &Arc<Self>, id: &str, host: &dyn HostDevice, info: &DeviceInfo) -> io::Result<Watched> {
        let mut watched = Watched { watch: Arc::downgrade(self), numbers: Vec::new() };
        for (notice, index) in Notice::ALL {
            // Not every device reports errors.
            if info.irqs.get(index as usize).is_none_or(|irq| irq.count == 0) {
                continue;
            }
            let eventfd = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
            host.set_irqs(index, 0, &[Some(Arc::clone(&eventfd))])?;
            let mut entries = self.entries.lock();
            let number = entries.next;
            entries.next += 1;
            epoll::add(&self.epoll, borrow_eventfd(&eventfd), EventData::new_u64(number), EventFlags::IN)?;
            entries.by_number.insert(number, Entry { id: id.to_string(), notice, eventfd });
            watched.numbers.push(number);
        }
        Ok(watched)
    }

    /// Takes the notices of the host since the last call, with their devices.
    pub(crate) fn take(&self) -> Vec<(String, Notice)> {
        let mut events = Vec::with_capacity(AT_MOST);
        if epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&AT_ONCE)).is_err() {
            return Vec::new();
        }
        let entries = self.entries.lock();
        let told = events.iter().filter_map(|event: &Event| {
            let data = event.data;
            let entry = entries.by_number.get(&data.u64())?;
            let _ = entry.eventfd.read();
            Some((entry.id.clone(), entry.notice))
        });
        told.collect()
    }
}

/// Readable when a notice is pending.
impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let Some(watch) = self.watch.upgrade() else { return };
        let mut entries = watch.entries.lock();
        for number in &self.numbers {
            if let Some(entry) = entries.by_number.remove(number) {
                // The device still has the eventfd, until it is closed.
                let _ = epoll::delete(&watch.epoll, borrow_eventfd(&entry.eventfd));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfio::fake::FakeDevice;
    use crate::vfio::kernel::info::IrqInfo;

    fn info(requests: u32, errors: u32) -> DeviceInfo {
        let mut info = DeviceInfo::default();
        info.irqs[VFIO_PCI_REQ_IRQ_INDEX as usize] = IrqInfo { flags: 1, count: requests };
        info.irqs[VFIO_PCI_ERR_IRQ_INDEX as usize] = IrqInfo { flags: 1, count: errors };
        info
    }

    #[test]
    fn an_error_and_a_request_of_the_host_name_their_device() {
        let watch = Arc::new(Watch::new().unwrap());
        let (first, second) = (FakeDevice::default(), FakeDevice::default());
        let one = watch.begin("one", &first, &info(1, 1)).unwrap();
        let _two = watch.begin("two", &second, &info(1, 0)).unwrap();
        assert_eq!(watch.take(), []);
        first.signal(VFIO_PCI_ERR_IRQ_INDEX, 0);
        second.signal(VFIO_PCI_REQ_IRQ_INDEX, 0);
        let mut told = watch.take();
        told.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(told, [("one".to_string(), Notice::Error), ("two".to_string(), Notice::Requested)]);
        assert_eq!(watch.take(), [], "once");
        drop(one);
        first.signal(VFIO_PCI_REQ_IRQ_INDEX, 0);
        assert_eq!(watch.take(), [], "there are no requests left");
        assert!(!second.has(VFIO_PCI_ERR_IRQ_INDEX), "it reports no errors");
    }
}
