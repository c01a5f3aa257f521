//! Doorbell pages of a device, which the guest can write to without an exit.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The length of a doorbell page in bytes: at most the page size of any host that has them.
pub const DOORBELL_PAGE: u64 = 4096;

/// The doorbell of one queue of a device, alone on its page. The page stays mapped, and the device open, until this is
/// dropped.
pub struct DoorbellPage(NonNull<u8>);

// SAFETY: the mapping belongs to the process and not to a thread, and it has no state that a write could leave half
// done.
unsafe impl Send for DoorbellPage {}
// SAFETY: as above; nothing but aligned stores of 2 bytes is ever done to it.
unsafe impl Sync for DoorbellPage {}

impl DoorbellPage {
    /// Maps the page of `queue`. A device's pages are in queue order (Linux, `vhost_vdpa_mmap`).
    ///
    /// # Errors
    ///
    /// Fails if the device has no such page (`ENOTSUPP`, 524), or there is no address space.
    pub fn map(device: impl AsFd, queue: u16) -> io::Result<Self> {
        let len = DOORBELL_PAGE as usize;
        // SAFETY: the kernel chooses the address, so that no other mapping is touched.
        let address = unsafe {
            // Linux maps these pages write-only.
            mmap(ptr::null_mut(), len, ProtFlags::WRITE, MapFlags::SHARED, device, u64::from(queue) * DOORBELL_PAGE)
        }?;
        NonNull::new(address.cast()).map(Self).ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// The address of the page in this process.
    pub fn address(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Notifies the device of available buffers in `queue`, whose doorbell this is (`virtio 1.4 §4.1.5.2`).
    pub fn ring(&self, queue: u16) {
        // SAFETY: the page is mapped, for writing, and longer than 2 bytes; nothing has a reference into it.
        unsafe { self.0.cast::<u16>().write_volatile(queue.to_le()) };
    }
}

impl Drop for DoorbellPage {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and the VMM keeps this value while a guest can see the page.
        let unmapped = unsafe { munmap(self.0.as_ptr().cast(), DOORBELL_PAGE as usize) };
        debug_assert!(unmapped.is_ok());
    }
}

impl fmt::Debug for DoorbellPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DoorbellPage({:p})", self.0)
    }
}

/// A callback for changes of a backend's pages, on the thread of a NIC's worker, which holds no lock except the
/// backend's.
pub(crate) type PagesObserver = Box<dyn Fn() + Send + Sync>;

/// The doorbells that the guest may currently write to directly: those of the queues that the NIC's backend runs. The
/// backend sets them, the machine maps them.
#[derive(Default)]
pub struct DoorbellPages {
    pages: Mutex<BTreeMap<u16, Arc<DoorbellPage>>>,
    observer: OnceLock<PagesObserver>,
}

impl DoorbellPages {
    /// Calls `observer` on each change from now on. Only the first observer is kept.
    pub fn observe(&self, observer: PagesObserver) {
        let _ = self.observer.set(observer);
    }

    /// The doorbell page of `queue`.
    pub fn get(&self, queue: u16) -> Option<Arc<DoorbellPage>> {
        self.pages.lock().get(&queue).cloned()
    }

    /// Replaces all pages by `pages`, keyed by queue. On return, the guest has these mapped and all others unmapped,
    /// unless the host failed.
    pub(crate) fn set(&self, pages: impl IntoIterator<Item = (u16, Arc<DoorbellPage>)>) {
        let pages: BTreeMap<_, _> = pages.into_iter().collect();
        let before = std::mem::replace(&mut *self.pages.lock(), pages);
        let now_empty = self.pages.lock().is_empty();
        if !(before.is_empty() && now_empty)
            && let Some(observer) = self.observer.get()
        {
            observer();
        }
    }
}

impl fmt::Debug for DoorbellPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DoorbellPages").field(&*self.pages.lock()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn device() -> std::fs::File {
        let file = rustix::fs::memfd_create("doorbells", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4 * DOORBELL_PAGE).unwrap();
        file.into()
    }

    #[test]
    fn a_ring_is_the_queues_number_in_its_own_page() {
        let device = device();
        DoorbellPage::map(&device, 2).unwrap().ring(0x102);
        let mut pages = vec![0; 4 * DOORBELL_PAGE as usize];
        device.read_exact_at(&mut pages, 0).unwrap();
        let rung: Vec<_> = pages.iter().enumerate().filter(|(_, byte)| **byte != 0).collect();
        assert_eq!(rung, [(0x2000, &2), (0x2001, &1)]);
    }

    #[test]
    fn a_device_without_pages_is_an_error() {
        let pipe = rustix::pipe::pipe().unwrap().0;
        assert!(DoorbellPage::map(&pipe, 0).is_err());
    }

    #[test]
    fn changes_are_reported_when_they_can_be_seen() {
        let (pages, told) = (Arc::new(DoorbellPages::default()), Arc::new(AtomicUsize::new(0)));
        let (seen, count) = (Arc::downgrade(&pages), Arc::clone(&told));
        pages.observe(Box::new(move || {
            let given = seen.upgrade().is_some_and(|pages| pages.get(1).is_some());
            count.fetch_add(if given { 1 } else { 10 }, Ordering::Relaxed);
        }));
        pages.set([]);
        assert_eq!(told.load(Ordering::Relaxed), 0, "nothing has changed");
        pages.set([(1, Arc::new(DoorbellPage::map(device(), 1).unwrap()))]);
        assert_eq!((told.load(Ordering::Relaxed), pages.get(0).is_none()), (1, true));
        pages.set([]);
        assert_eq!((told.load(Ordering::Relaxed), pages.get(1).is_none()), (11, true));
    }
}
