//! Messages, masks and pending bits.

use super::*;
use crate::{Fault, FaultError};

#[test]
fn a_message_has_the_routing_id_of_its_function() {
    let (mut device, _) = enabled(4, 2);
    for place in [Place::Pf, Place::Vf(0), Place::Vf(1)] {
        set_up_msix(&mut device, place, 3 + if place == Place::Pf { 61 } else { 0 });
        set_up_mailbox(&mut device, place);
    }
    assert_eq!(messages(&device, Reach::Device).len(), 64 + 3 + 3);
    assert_eq!(messages(&device, Reach::Nothing).len(), 0);
    // VF 1 has a message for the PF, which has one for VF 0.
    let _ = write(&mut device, Place::Vf(1), 0x2fc, 1);
    assert_eq!([Place::Pf, Place::Vf(0), Place::Vf(1)].map(|place| arrived(&device, place)), [vec![5], vec![], vec![]]);
    let _ = write(&mut device, Place::Pf, 0x4b00, 1);
    assert_eq!([Place::Pf, Place::Vf(0), Place::Vf(1)].map(|place| arrived(&device, place)), [vec![], vec![2], vec![]]);
    device.set_link(true);
    assert_eq!(arrived(&device, Place::Pf), [0; 0], "LSC is not enabled");
    let _ = write(&mut device, Place::Pf, 0x880, 1 << 20);
    assert_eq!(arrived(&device, Place::Pf), [5]);
}

#[test]
fn a_masked_vector_keeps_its_signal_as_the_pending_bit() {
    let (mut device, _) = enabled(4, 1);
    let vf = Place::Vf(0);
    set_up_msix(&mut device, vf, 3);
    set_up_mailbox(&mut device, vf);
    assert!(write_bar(&mut device, vf, VF_MSIX_BAR, 2 * 16 + 12, 1).messages);
    let _ = write(&mut device, Place::Pf, 0x4b00, 1);
    assert_eq!((pending(&mut device, vf), messages(&device, Reach::Function(rid(0))).len()), (1 << 2, 2));
    assert!(write_bar(&mut device, vf, VF_MSIX_BAR, 2 * 16 + 12, 0).messages);
    assert_eq!((pending(&mut device, vf), arrived(&device, vf)), (0, vec![2]));
    // The function mask, and MSI-X Enable.
    let _ = write(&mut device, vf, 0x100, 4);
    for control in [0xc000_0000, 0] {
        let _ = write_config(&mut device, rid(0), 0x70, control);
        let _ = write(&mut device, Place::Pf, 0x4b00, 1);
        assert_eq!((pending(&mut device, vf), arrived(&device, vf)), (1 << 2, vec![]), "{control:#x}");
    }
    let _ = write_config(&mut device, rid(0), 0x70, 0x8000_0000);
    assert_eq!((pending(&mut device, vf), arrived(&device, vf)), (0, vec![2]));
}

#[test]
fn a_function_sends_nothing_without_bus_mastering_or_power() {
    let (mut device, _) = enabled(4, 2);
    for place in [Place::Pf, Place::Vf(0), Place::Vf(1)] {
        set_up_msix(&mut device, place, 3);
    }
    set_up_mailbox(&mut device, Place::Vf(0));
    set_master(&mut device, rid(0), false);
    let _ = write(&mut device, Place::Pf, 0x4b00, 1);
    assert_eq!((pending(&mut device, Place::Vf(0)), arrived(&device, Place::Vf(0))), (4, vec![]));
    assert!(!device.may_send(rid(0)) && device.may_send(rid(1)) && device.may_send(PF));
    set_master(&mut device, rid(0), true);
    assert_eq!((pending(&mut device, Place::Vf(0)), arrived(&device, Place::Vf(0))), (0, vec![2]));
    set_master(&mut device, PF, false);
    assert_eq!(messages(&device, Reach::Device).len(), 6, "those of VFs");
    set_master(&mut device, PF, true);
    // PowerState D3hot.
    let _ = write_config(&mut device, PF, 0x44, 3);
    assert_eq!(messages(&device, Reach::Device).len(), 0);
    let _ = write_config(&mut device, PF, 0x44, 0);
    assert_eq!(messages(&device, Reach::Device).len(), 9);
}

#[test]
fn a_thread_sends_interrupts_without_the_device() {
    let (mut device, _) = enabled(4, 2);
    set_up_msix(&mut device, Place::Vf(1), 3);
    set_up_msix(&mut device, Place::Pf, 64);
    // Vectors 0 and 1 of queue 0 of VF 1, which is queue 2 of the NIC; vector 9 of queue 127, which is the PF's.
    for (place, offset, value) in [
        (Place::Vf(1), 0x120, 0x8180),
        (Place::Vf(1), 0x108, 3),
        (Place::Pf, 0x900 + 63 * 4, 0x8900_0000),
        (Place::Pf, 0xaa0, 1 << 9),
    ] {
        let _ = write(&mut device, place, offset, value);
    }
    let handle = device.nic().clone();
    let _device_is_locked = &mut device;
    std::thread::spawn(move || {
        for (direction, queue) in [(Direction::Receive, 2), (Direction::Transmit, 2), (Direction::Transmit, 127)] {
            handle.queue_event(direction, queue);
        }
        // No queue, and one without a vector.
        handle.queue_event(Direction::Receive, 128);
        handle.queue_event(Direction::Receive, 0);
    })
    .join()
    .unwrap();
    assert_eq!((arrived(&device, Place::Vf(1)), arrived(&device, Place::Pf)), (vec![0, 1], vec![9]));
    assert_eq!(arrived(&device, Place::Vf(0)), [0; 0]);
}

#[test]
fn interrupts_that_the_host_wants_lost_do_not_arrive() {
    let (mut device, _) = enabled(4, 1);
    let vf = Place::Vf(0);
    set_up_msix(&mut device, vf, 3);
    set_up_mailbox(&mut device, vf);
    let lose = |vector, count| Fault::LoseInterrupts { name: "nicv0".to_string(), vector, count };
    let vf_0 = Some(VfIndex(0));
    assert_eq!(device.inject(vf_0, lose(Some(3), 1)), Err(FaultError::NoVector { vector: 3, last: 2 }));
    assert_eq!(device.inject(Some(VfIndex(4)), lose(None, 1)), Err(FaultError::NoVf));
    device.inject(None, lose(Some(63), 1)).unwrap();
    device.inject(vf_0, lose(Some(2), 2)).unwrap();
    let sent: Vec<_> = (0..4)
        .map(|_| {
            let _ = write(&mut device, vf, 0x100, 4);
            let _ = write(&mut device, Place::Pf, 0x4b00, 1);
            arrived(&device, vf).len()
        })
        .collect();
    assert_eq!(sent, [0, 0, 1, 1]);
}
