//! A fake host device.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::FileMapping;
use vmm_sys_util::eventfd::EventFd;

use crate::vfio::host_device::HostDevice;

/// Requests to a device, and its replies.
#[derive(Default)]
pub(super) struct State {
    /// Content of each region.
    pub regions: BTreeMap<usize, Vec<u8>>,
    /// Writes: region, offset, bytes.
    pub writes: Vec<(usize, u64, Vec<u8>)>,
    /// Eventfds by kind of interrupt and number.
    pub irqs: BTreeMap<(u32, u32), Option<Arc<EventFd>>>,
    /// Eventfds that unmask interrupts, by kind.
    pub unmasks: BTreeMap<u32, Arc<EventFd>>,
    /// True if setting the eventfd that unmasks an interrupt fails from now on.
    pub no_unmask: bool,
    /// Calls that set or clear interrupts.
    pub calls: Vec<String>,
    /// True if calls fail from now on.
    pub fails: bool,
    /// True if the kernel cannot add vectors while some are in use.
    pub fixed: bool,
    /// Resets.
    pub resets: usize,
    /// Mappings: region, offset, length.
    pub mapped: Vec<(usize, u64, u64)>,
}

/// A device whose state a test shares.
#[derive(Default, Clone)]
pub(super) struct FakeDevice(pub Arc<Mutex<State>>);

impl FakeDevice {
    /// Signals the interrupt `number` of kind `index`.
    pub(super) fn signal(&self, index: u32, number: u32) {
        if let Some(Some(eventfd)) = self.0.lock().irqs.get(&(index, number)) {
            eventfd.write(1).unwrap();
        }
    }

    /// True if interrupts of kind `index` were requested.
    pub(super) fn has(&self, index: u32) -> bool {
        self.0.lock().irqs.keys().any(|(other, _)| *other == index)
    }

    /// Takes the interrupt calls since the last time.
    pub(super) fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().calls)
    }

    /// Takes the writes since the last time.
    pub(super) fn take_writes(&self) -> Vec<(usize, u64, Vec<u8>)> {
        std::mem::take(&mut self.0.lock().writes)
    }
}

impl HostDevice for FakeDevice {
    fn read(&self, region: usize, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let state = self.0.lock();
        let held = state.regions.get(&region).and_then(|held| held.get(usize::try_from(offset).unwrap()..));
        data.iter_mut().zip(held.unwrap_or_default()).for_each(|(to, from)| *to = *from);
    }

    fn write(&self, region: usize, offset: u64, data: &[u8]) {
        let mut state = self.0.lock();
        state.writes.push((region, offset, data.to_vec()));
        let held = state.regions.get_mut(&region).and_then(|held| held.get_mut(usize::try_from(offset).unwrap()..));
        held.unwrap_or_default().iter_mut().zip(data).for_each(|(to, from)| *to = *from);
    }

    fn set_irqs(&self, index: u32, start: u32, eventfds: &[Option<Arc<EventFd>>]) -> io::Result<()> {
        let mut state = self.0.lock();
        if state.fails {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        // The kernel allows one of these kinds at a time: a pin, MSI and MSI-X.
        let other = |other: u32| other != index && other.max(index) <= 2;
        assert!(state.irqs.keys().all(|(kind, _)| !other(*kind)), "another kind is on");
        let last = state.irqs.keys().filter(|(other, _)| *other == index).map(|(_, number)| *number).max();
        let count = u32::try_from(eventfds.len()).unwrap();
        assert!(!state.fixed || last.is_none_or(|last| start + count <= last + 1), "it cannot grow");
        let given = eventfds.iter().filter(|eventfd| eventfd.is_some()).count();
        state.calls.push(format!("{index}: {given} of {start}+{count}"));
        state.irqs.extend((start..).zip(eventfds).map(|(number, eventfd)| ((index, number), eventfd.clone())));
        Ok(())
    }

    fn set_unmask(&self, index: u32, eventfd: &Arc<EventFd>) -> io::Result<()> {
        let mut state = self.0.lock();
        assert!(state.irqs.keys().any(|(other, _)| *other == index), "it is not on");
        if state.no_unmask {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        state.calls.push(format!("{index}: unmask"));
        state.unmasks.insert(index, Arc::clone(eventfd));
        Ok(())
    }

    fn clear_irqs(&self, index: u32) -> io::Result<()> {
        let mut state = self.0.lock();
        state.calls.push(format!("{index}: off"));
        state.unmasks.remove(&index);
        state.irqs.retain(|(other, _), _| *other != index);
        Ok(())
    }

    fn reset(&self) -> io::Result<()> {
        let mut state = self.0.lock();
        state.resets += 1;
        if state.fails { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    fn map(&self, region: usize, offset: u64, len: u64) -> io::Result<FileMapping> {
        let file = tempfile::tempfile()?;
        file.set_len(offset + len)?;
        let mapping = FileMapping::of_device(&file, offset, len)?;
        self.0.lock().mapped.push((region, offset, len));
        Ok(mapping)
    }
}
