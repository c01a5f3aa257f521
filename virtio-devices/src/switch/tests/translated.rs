//! Ports behind an IOMMU: a sender's worker accesses the receiver's memory by the receiver's mappings, and the sender's
//! by its own.

use std::sync::Arc;

use vm_memory::Permissions;

use super::rig::*;
use crate::iommu::{Iommu, IommuAttachment, IommuCounter, Range, Request};
use crate::testing::driver_queue::{WRITE, soon};

/// The ports behind the IOMMU, in a domain each.
const PORTS: [u16; 2] = [1, 2];

fn lan() -> (Lan, Arc<Iommu>, Vec<IommuAttachment>) {
    let (mut lan, iommu) = (Lan::new(&Config::closed(3)), Iommu::new(48));
    let attachment: Vec<_> =
        PORTS.iter().map(|port| iommu.add_endpoint(0, pci::Rid::from_bits(0x100 | port))).collect();
    for (port, attachment) in PORTS.iter().zip(&attachment) {
        let (domain, endpoint) = (u32::from(*port), u32::from(0x100 | port));
        iommu.carry_out(Request::Attach { domain, endpoint, bypass: false }).unwrap();
        let nic = &mut lan.nics[usize::from(*port)];
        nic.iommu = Some(Arc::clone(attachment.endpoint()) as _);
        for place in nic.places() {
            map(&iommu, *port, place);
        }
    }
    lan.nics.iter_mut().for_each(|nic| nic.start(FEATURES));
    lan.nics[0].set_promiscuous(false);
    lan.settle();
    (lan, iommu, attachment)
}

fn map(iommu: &Iommu, port: u16, (first, last): (u64, u64)) {
    let (range, access) = (Range { first, last }, Permissions::ReadWrite);
    iommu.carry_out(Request::Map { domain: port.into(), range, target: first, access }).unwrap();
}

fn unmap(iommu: &Iommu, port: u16, (first, last): (u64, u64)) {
    iommu.carry_out(Request::Unmap { domain: port.into(), range: Range { first, last } }).unwrap();
}

fn faults(iommu: &Iommu) -> u64 {
    iommu.counters().get(IommuCounter::Faults)
}

#[test]
fn frames_move_only_between_memory_mapped_for_each_port() {
    let (mut lan, iommu, _attachment) = lan();
    let hello = frame(mac(1), mac(2), 300);
    lan.nics[2].provide(8, 2048);
    lan.nics[1].send(&hello);
    assert_eq!(lan.nics[2].received(), std::slice::from_ref(&hello));

    // The sender's mappings are of no use to the receiver.
    let [_, buffers] = lan.nics[2].places();
    unmap(&iommu, 2, buffers);
    map(&iommu, 1, buffers);
    lan.nics[2].wipe();
    let before = faults(&iommu);
    lan.nics[1].send(&hello);
    assert!(lan.nics[2].is_wiped() && faults(&iommu) > before);
    unmap(&iommu, 1, buffers);
    map(&iommu, 2, buffers);

    // The same applies to memory that the sender may not read.
    let [_, own] = lan.nics[1].places();
    unmap(&iommu, 1, own);
    let before = faults(&iommu);
    lan.nics[1].send(&hello);
    assert!(lan.nics[2].received().is_empty() && faults(&iommu) > before);
    map(&iommu, 1, own);
    lan.nics[2].provide(8, 2048);
    lan.nics[1].send(&hello);
    assert_eq!(lan.nics[2].received(), [hello]);
    assert!(lan.nics.iter().all(|nic| !nic.interrupts.needs_reset()));
}

#[test]
fn buffers_unmapped_while_another_port_sends_are_not_written() {
    const ROUNDS: usize = 10_000;
    /// The frames of a round.
    const BURST: usize = 4;
    const CANARY: [u8; 64] = [0xc5; 64];
    let (mut lan, iommu, _attachment) = lan();
    let [_, buffers] = lan.nics[2].places();
    // One buffer for all frames, so that a single write wipes it.
    let buffer = buffers.0;
    let hello = frame(mac(1), mac(2), 1000);
    let mut arrived = 0;
    for round in 0..ROUNDS {
        while lan.nics[2].rx.outstanding() < 2 * BURST {
            lan.nics[2].rx.add(&[(buffer, 2048, WRITE)]);
        }
        (0..BURST).for_each(|_| lan.nics[1].queue(&hello));
        lan.nics[1].kick();
        // At any moment of the switch's work.
        (0..round % 500 * 10).for_each(|_| std::hint::spin_loop());
        unmap(&iommu, 2, buffers);
        lan.nics[2].rx.memory_write(buffer, &CANARY);
        let (mut sent, tx) = (0, &mut lan.nics[1].tx);
        soon("the frames to be sent", || {
            sent += tx.take_used().len();
            sent >= BURST
        });
        assert_eq!(lan.nics[2].rx.bytes(buffer, CANARY.len()), CANARY, "{round}");
        arrived += lan.nics[2].rx.take_used().iter().filter(|(_, len)| *len > 0).count();
        map(&iommu, 2, buffers);
    }
    println!("{ROUNDS} rounds, {arrived} frames, {} faults", faults(&iommu));
    assert!(arrived > 0 && faults(&iommu) > 0);
}
