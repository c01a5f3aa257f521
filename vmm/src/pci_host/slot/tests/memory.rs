//! Memory of a device that is mapped into the guest.

use virtio_devices::FileMapping;

use super::*;
use crate::pci_host::recording_vm::Refuse::Doorbells;

const LEN: u64 = 0x2000;

fn mapping(private: bool) -> Arc<FileMapping> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN).unwrap();
    Arc::new(FileMapping::new(&file, LEN, private).unwrap())
}

fn area(offset: u64, memory: Arc<FileMapping>) -> MemoryArea {
    MemoryArea { window: bar(), offset, memory, peers: None }
}

/// Memory that the guest has: its guest addresses, and those in this process.
fn shown(record: &Mutex<Record>) -> Vec<(u64, usize)> {
    record.lock().memory.values().copied().collect()
}

#[test]
fn memory_lies_where_its_window_does_and_goes_with_it() {
    let Rig { wants, record, host, slot } = rig();
    let memory = mapping(false);
    let at = memory.address() as usize;
    wants.lock().memory = vec![area(0, memory)];
    slot.reconcile();
    assert_eq!(shown(&record), [], "it has no place yet");
    for base in [0x10_0000, 0x20_0000] {
        wants.lock().windows = vec![window(base)];
        slot.reconcile();
        slot.reconcile();
        assert_eq!(shown(&record), [(base, at)]);
    }
    // A new VM gets the memory again.
    let second = Arc::<Mutex<Record>>::default();
    host.set_wiring(Some(Box::new(RecordingVm(Arc::clone(&second)))));
    slot.forget_wiring();
    slot.reconcile();
    assert_eq!(shown(&second), [(0x20_0000, at)]);
    slot.retire();
    assert_eq!(shown(&second), []);
}

#[test]
fn memory_that_the_host_refuses_is_tried_again() {
    let Rig { wants, record, slot, .. } = rig();
    let memory = mapping(false);
    let at = memory.address() as usize;
    {
        let mut says = wants.lock();
        says.memory = vec![area(0, memory)];
        says.windows = vec![window(0x10_0000)];
    }
    record.lock().refuse = Doorbells;
    slot.reconcile();
    assert_eq!(shown(&record), []);
    record.lock().refuse = Nothing;
    slot.reconcile();
    assert_eq!(shown(&record), [(0x10_0000, at)]);
    record.lock().refuse = Doorbells;
    wants.lock().windows.clear();
    slot.reconcile();
    assert_eq!(shown(&record), [(0x10_0000, at)], "it cannot be taken away now");
    record.lock().refuse = Nothing;
    slot.reconcile();
    assert_eq!(shown(&record), []);
}

#[test]
fn discarded_memory_loses_guest_writes_with_its_vm() {
    let Rig { wants, slot, .. } = rig();
    let memory = mapping(true);
    wants.lock().memory = vec![area(0, Arc::clone(&memory))];
    // SAFETY: the first byte is mapped, and nothing has a reference to it.
    let (write, read) =
        (|byte| unsafe { memory.address().write_volatile(byte) }, || unsafe { memory.address().read_volatile() });
    write(7);
    slot.reconcile();
    assert_eq!(read(), 7);
    slot.forget_wiring();
    assert_eq!(read(), 0);
}

#[test]
fn areas_of_a_window_lie_at_their_offsets_and_move_together() {
    let Rig { wants, record, slot, .. } = rig();
    let (first, second) = (mapping(false), mapping(false));
    let at = [&first, &second].map(|memory| memory.address() as usize);
    wants.lock().memory = vec![area(0, first), area(0x4000, second)];
    for base in [0x10_0000, 0x10_4000] {
        wants.lock().windows = vec![window(base)];
        slot.reconcile();
        // The areas exchange addresses: all are removed first.
        let mut shown = shown(&record);
        shown.sort_unstable();
        assert_eq!(shown, [(base, at[0]), (base + 0x4000, at[1])]);
    }
    wants.lock().windows.clear();
    slot.reconcile();
    assert_eq!(shown(&record), []);
}
