//! Doorbell pages of a host device that are mapped into the guest.

use virtio_devices::{DOORBELL_PAGE, DoorbellPage};

use super::*;
use crate::pci_host::recording_vm::Refuse::Doorbells;

fn page() -> Arc<DoorbellPage> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(DOORBELL_PAGE).unwrap();
    Arc::new(DoorbellPage::map(&file, 0).unwrap())
}

/// The doorbells that the guest has as pages.
fn shown(record: &Mutex<Record>) -> Vec<(u64, usize)> {
    record.lock().doorbells.values().copied().collect()
}

fn paged(offset: u64, eventfd: &Arc<EventFd>, page: &Arc<DoorbellPage>) -> Doorbell {
    Doorbell { page: Some(Arc::clone(page)), ..doorbell(offset, eventfd) }
}

#[test]
fn doorbell_pages_overlay_eventfds_and_follow_their_window() {
    let Rig { wants, record, slot, .. } = rig();
    let (kick, first, second) = (eventfd(), page(), page());
    let at = |page: &Arc<DoorbellPage>| page.address() as usize;
    {
        let mut says = wants.lock();
        says.windows = vec![window(0x10_0000)];
        says.doorbells = vec![paged(0, &kick, &first), paged(0x1000, &kick, &second)];
    }
    slot.reconcile();
    assert_eq!(shown(&record), [(0x10_0000, at(&first)), (0x10_1000, at(&second))]);
    assert_eq!(counts(&record).2, 2, "eventfds take over at any time");
    slot.reconcile();
    wants.lock().windows = vec![window(0x20_0000)];
    slot.reconcile();
    assert_eq!(shown(&record), [(0x20_0000, at(&first)), (0x20_1000, at(&second))]);
    // Another page at the same place, and then none.
    wants.lock().doorbells = vec![paged(0, &kick, &second), doorbell(0x1000, &kick)];
    slot.reconcile();
    assert_eq!((shown(&record), counts(&record).2), (vec![(0x20_0000, at(&second))], 2));
    wants.lock().windows.clear();
    slot.reconcile();
    assert_eq!((shown(&record), counts(&record).2), (Vec::new(), 0));
}

#[test]
fn doorbell_page_change_is_applied_to_its_function_alone() {
    let Rig { wants, record, slot, .. } = rig();
    let (kick, own) = (eventfd(), page());
    {
        let mut says = wants.lock();
        says.windows = vec![window(0x10_0000)];
        says.doorbells = vec![doorbell(0, &kick), Doorbell { function: VF, ..doorbell(SLICE, &kick) }];
    }
    slot.reconcile();
    let observer = wants.lock().observer.clone().unwrap();
    let asked = wants.lock().asked;
    wants.lock().doorbells[1].page = Some(Arc::clone(&own));
    observer(VF);
    assert_eq!(shown(&record), [(0x10_1000, own.address() as usize)]);
    assert_eq!(wants.lock().asked, (asked.0, asked.1 + 1), "only that VF is asked");
    wants.lock().doorbells[1].page = None;
    observer(VF);
    assert_eq!((shown(&record), Arc::strong_count(&own)), (Vec::new(), 1), "nothing keeps the device open");
    wants.lock().doorbells[0].page = Some(own);
    observer(PF);
    assert_eq!(shown(&record).len(), 1);
    slot.retire();
    assert_eq!(shown(&record), []);
}

#[test]
fn doorbell_page_refused_by_host_is_an_eventfd_and_retried() {
    let Rig { wants, record, host, slot } = rig();
    let (kick, own) = (eventfd(), page());
    {
        let mut says = wants.lock();
        says.windows = vec![window(0x10_0000)];
        says.doorbells = vec![paged(0, &kick, &own)];
    }
    record.lock().refuse = Doorbells;
    slot.reconcile();
    assert_eq!((shown(&record), counts(&record).2), (Vec::new(), 1));
    record.lock().refuse = Nothing;
    slot.reconcile();
    assert_eq!(record.lock().doorbells.keys().copied().collect::<Vec<_>>(), [128], "the memory slot was given back");
    // A page that cannot be hidden stays, and hiding is retried as well.
    wants.lock().doorbells[0].page = None;
    record.lock().refuse = Doorbells;
    slot.reconcile();
    assert_eq!(shown(&record).len(), 1);
    record.lock().refuse = Nothing;
    slot.reconcile();
    assert_eq!(shown(&record), []);
    // A new VM has no pages yet.
    wants.lock().doorbells[0].page = Some(own);
    slot.reconcile();
    slot.forget_wiring();
    let next = Arc::<Mutex<Record>>::default();
    host.set_wiring(Some(Box::new(RecordingVm(Arc::clone(&next)))));
    slot.reconcile();
    assert_eq!(next.lock().doorbells.keys().copied().collect::<Vec<_>>(), [128]);
}
