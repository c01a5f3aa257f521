//! A NIC behind an IOMMU, over a peer that has mapped all of the guest's memory.

use std::thread;

use super::*;
use crate::iommu::{Iommu, Request};
use crate::memory::Translate;
use crate::{DmaSpace, NetSpec, VirtioDevice};

#[test]
fn a_confined_function_is_link_down_with_a_reason_until_bypass() {
    record_log();
    let (rig, iommu) = (Rig::new(), Iommu::new(48));
    let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
    let peer = rig.peer(Script::new(1));
    let spec = NetSpec { id: "confined".into(), ..spec(1, 16) };
    let mut guest = Guest::over_in(spec, rig.connect(1).unwrap(), rig.map.clone());
    peer.heard();
    let mut start = guest.to_start(guest.device.features());
    let endpoint = Arc::clone(attachment.endpoint()) as Arc<dyn Translate>;
    start.memory = DmaSpace::translated(start.memory.memory().clone(), endpoint);
    guest.workers = guest.device.start(start).unwrap();
    peer.await_heard("STATUS 15");
    rig.check_traffic(&mut guest, 60);
    assert!(guest.device.link_up(), "bypass at boot");

    iommu.carry_out(Request::Attach { domain: 1, endpoint: 0x100, bypass: false }).unwrap();
    let heard = peer.heard();
    assert!(["GET_BASE 0", "GET_BASE 1"].iter().all(|stop| heard.iter().any(|heard| heard == stop)), "{heard:?}");
    await_loss(&guest, true);
    assert!(!guest.device.link_up());
    eventually("the warning", || !logged("confined").is_empty());
    let warnings = logged("confined");
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    for part in ["its function is in a domain of the virtual IOMMU", "iommu.passthrough=1", "its link is down"] {
        assert!(warning.contains(part), "{warning}");
    }
    guest.queues[1].send(BUFFERS, &with_header(&frame(OTHER, 77)), &[12]);
    guest.kick(1);
    thread::sleep(Duration::from_millis(50));
    assert_eq!((receive(&rig.wire), guest.queues[1].take_used().len()), (None, 0), "nothing reads its rings");

    iommu.carry_out(Request::Attach { domain: 2, endpoint: 0x100, bypass: true }).unwrap();
    await_loss(&guest, false);
    assert!(guest.device.link_up());
    eventually("the frame", || receive(&rig.wire) == Some(with_header(&frame(OTHER, 77))));
    eventually("its return", || guest.queues[1].take_used().len() == 1);
    rig.check_traffic(&mut guest, 1000);
    assert_eq!(peer.connections(), 1, "of one connection");
}
