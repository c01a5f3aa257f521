//! Requests mixed with other events of a PF and its VFs: only requests change the mappings.

use std::sync::Arc;

use pci::{Device, Placement, ResetKind, Rid, VfIndex, VfPlacement};
use proptest::prelude::*;

use super::super::{Endpoint, Iommu, IommuDevice};
use super::properties::{ENDPOINTS, Model, Op, carry_out, op, seen_by};
use crate::VirtioDevice;
use crate::net_sriov::NetSriov;
use crate::testing::{Driver, FakeDevice, Hosted, memory};

/// The PF, which is the first endpoint. Its VFs are the others.
const PF: Rid = Rid::from_bits(0x100);
const VFS: u16 = ENDPOINTS as u16 - 1;
/// The SR-IOV capability in the PF's configuration space.
const SRIOV: u64 = 0x100;
/// Bytes of a VF's slice of the registers' BAR.
const SLICE: u64 = 0x2000;

/// Event of a test.
#[derive(Debug, Clone, Copy)]
enum Event {
    Request(Op),
    /// The guest enables this many VFs, after disabling the present ones.
    Enable(u16),
    Disable,
    /// The driver of a function (the PF is 0) initializes it.
    Start(u16),
    /// The driver resets it.
    DriverReset(u16),
    FunctionLevelReset(u16),
    /// The IOMMU's driver resets the IOMMU.
    IommuReset,
    MachineReset,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        12 => op().prop_map(Event::Request),
        2 => (0..=VFS).prop_map(Event::Enable),
        1 => Just(Event::Disable),
        2 => (0..=VFS).prop_map(Event::Start),
        2 => (0..=VFS).prop_map(Event::DriverReset),
        2 => (0..=VFS).prop_map(Event::FunctionLevelReset),
        1 => Just(Event::IommuReset),
        1 => Just(Event::MachineReset),
    ]
}

struct Rig {
    iommu: Arc<Iommu>,
    device: IommuDevice,
    endpoints: Vec<Arc<Endpoint>>,
    functions: Hosted<NetSriov<FakeDevice>>,
}

impl Rig {
    fn new() -> Self {
        let place = VfPlacement { total_vfs: VFS, first_vf_offset: 1, vf_stride: 1 };
        let placement = Placement { segment: 0, rid: PF, vfs: Some(place) };
        let nic = || FakeDevice::new(&[256, 256]);
        let mut functions = NetSriov::new(nic(), (0..VFS).map(|_| nic()).collect(), placement, &memory()).unwrap();
        let (iommu, mut endpoints) = (Iommu::new(64), Vec::new());
        functions.attach_iommu(|rid| {
            let attachment = iommu.add_endpoint(0, rid);
            endpoints.push(Arc::clone(attachment.endpoint()));
            Some(attachment)
        });
        let device = IommuDevice::new("iommu", Arc::clone(&iommu));
        Self { iommu, device, endpoints, functions: Hosted::new(functions) }
    }

    fn driver(&mut self, function: u16) -> Driver<'_, Hosted<NetSriov<FakeDevice>>> {
        let rid = Rid::from_bits(PF.to_bits() + function);
        match function.checked_sub(1) {
            None => Driver::new(&mut self.functions, rid),
            Some(vf) => Driver::of_vf(&mut self.functions, rid, u64::from(vf) * SLICE),
        }
    }

    fn set_vf_enable(&mut self, on: bool) {
        let _ = self.driver(0).config_write(SRIOV + 8, 2, if on { 9 } else { 0 });
    }

    /// True if the queues of a function run.
    fn runs(&self, function: u16) -> bool {
        let vf = |index| self.functions.vf(VfIndex(index)).unwrap();
        function.checked_sub(1).map_or_else(|| self.functions.pf().is_running(), |index| vf(index).is_running())
    }

    /// Applies an event to the functions, independently of the IOMMU, or to the IOMMU as a whole.
    fn happen(&mut self, event: Event) {
        match event {
            Event::Request(op) => _ = carry_out(&self.iommu, op),
            Event::Enable(num_vfs) => {
                self.set_vf_enable(false);
                let _ = self.driver(0).config_write(SRIOV + 0x10, 2, num_vfs.into());
                self.set_vf_enable(true);
            }
            Event::Disable => self.set_vf_enable(false),
            Event::Start(function) => _ = self.driver(function).init(),
            Event::DriverReset(function) => _ = self.driver(function).set_status(0),
            Event::FunctionLevelReset(function) => _ = self.driver(function).flr(),
            Event::IommuReset => self.device.reset(),
            Event::MachineReset => {
                let _ = self.functions.reset(ResetKind::Conventional);
                self.device.reset();
                self.iommu.power_on();
            }
        }
    }
}

proptest! {
    #[test]
    fn only_iommu_requests_and_resets_change_pf_and_vf_mappings(
        events in prop::collection::vec(event(), 1..60)
    ) {
        let (mut model, mut rig) = (Model::default(), Rig::new());
        model.carry_out(Op::Bypass(true));
        for event in events {
            match event {
                Event::Request(op) => prop_assert_eq!(carry_out(&rig.iommu, op), model.carry_out(op), "{:?}", op),
                _ => rig.happen(event),
            }
            match event {
                Event::IommuReset => _ = model.carry_out(Op::Reset),
                Event::MachineReset => _ = (model.carry_out(Op::Reset), model.carry_out(Op::Bypass(true))),
                _ => {}
            }
            prop_assert_eq!(seen_by(&rig.endpoints), model.seen(), "{:?}", event);
            prop_assert_eq!(rig.iommu.table.lock().counts(), model.counts(), "{:?}", event);
        }
    }
}

/// The same in a fixed order: the events do happen.
#[test]
fn reset_or_disabled_vfs_keep_their_domain_until_detached() {
    let ends = [Event::Request(Op::Detach(1, 2)), Event::IommuReset];
    for end in ends {
        let mut rig = Rig::new();
        rig.happen(Event::Enable(VFS));
        rig.happen(Event::Request(Op::Attach(1, 2, false)));
        rig.happen(Event::Request(Op::Map(1, 3, 0, 7, true)));
        rig.happen(Event::Start(2));
        assert!(rig.runs(2));
        let mapped = seen_by(&rig.endpoints);
        for event in [Event::FunctionLevelReset(2), Event::DriverReset(2), Event::Disable, Event::FunctionLevelReset(0)]
        {
            rig.happen(event);
            assert!(!rig.runs(2), "{event:?}");
            assert_eq!(
                (seen_by(&rig.endpoints), rig.iommu.table.lock().counts()),
                (mapped.clone(), (1, 1)),
                "{event:?}"
            );
            rig.happen(Event::Enable(VFS));
            rig.happen(Event::Start(2));
            assert!(rig.runs(2), "{event:?}: and its next driver finds the mappings of the last");
        }
        rig.happen(end);
        assert_eq!(rig.iommu.table.lock().counts(), (0, 0), "{end:?}");
        assert_ne!(seen_by(&rig.endpoints), mapped);
        rig.happen(Event::MachineReset);
        assert!(!rig.runs(2) && !rig.runs(0));
    }
}
