//! The root buses of segment 0 for NICs on NUMA nodes (`--net numa=`).
//!
//! Bus 0 has one host bridge, so all its devices are on one node. If a NIC is to be on another node, every node gets a
//! root bus with a host bridge of its own, except the node that has segment 0 itself. Their numbers depend on the
//! number of nodes alone, not on the NICs, so that they stay the same when NICs come and go.

use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::option::Options as _;
use vm_api::config::{NetConfig, NumaConfig};

use crate::arch::x86_64::layout::MOST_SEGMENTS;
use crate::config::subject::Subject;
use crate::pci_layout::RootBus;

/// The root buses of segment 0 other than bus 0, by ascending numbers; none if no NIC needs one.
#[derive(Debug, Default)]
pub(crate) struct RootBuses(Vec<RootBus>);

impl RootBuses {
    /// Plans the root buses of a VM with these NICs, nodes and number of PCI segments. The nodes have been checked by
    /// themselves.
    ///
    /// # Errors
    ///
    /// Fails if a NIC is to be on a node that does not exist, or that its segment is not on, or if there would be too
    /// many root buses.
    pub(crate) fn plan(nets: &[NetConfig], nodes: &[NumaConfig], segments: u16) -> Result<Self, ConfigError> {
        let mut first = None;
        for (index, net) in nets.iter().enumerate() {
            let Some(node) = net.numa else { continue };
            let option = || Subject::device(NetConfig::OPTION, net.id.as_deref(), index, nets.len()).key("numa", node);
            let given = nodes.iter().find(|given| given.guest_numa_id == node);
            let given = given.ok_or_else(|| ConfigError::new(option(), no_such_node(nodes.len())))?;
            match net.pci_segment {
                segment if given.pci_segments.contains(&segment) => {}
                0 => first = first.or_else(|| Some(option())),
                segment => {
                    let what = format!(
                        "PCI segment {segment} is not on this node; leave pci_segment out, or give the node the \
                         segment by --numa guest_numa_id={node},pci_segments=[{segment}]"
                    );
                    return Err(ConfigError::new(option(), Problem::Conflict(what)));
                }
            }
        }
        let Some(option) = first else { return Ok(Self::default()) };
        let planned = Self::of_nodes(nodes);
        let bridges = usize::from(segments) + planned.0.len();
        if bridges > usize::from(MOST_SEGMENTS) {
            let what = format!(
                "each PCI segment and each NUMA node without segment 0 needs a host bridge, {bridges} together, and a \
                 VM has at most {MOST_SEGMENTS}; give fewer segments or nodes"
            );
            return Err(ConfigError::new(option, Problem::Limit(what)));
        }
        Ok(planned)
    }

    /// The root buses of a VM with these nodes, if a NIC needs any.
    pub(crate) fn of_nodes(nodes: &[NumaConfig]) -> Self {
        let without_segment = nodes.iter().filter(|node| !node.pci_segments.contains(&0));
        let mut without_segment: Vec<_> = without_segment.map(|node| node.guest_numa_id).collect();
        without_segment.sort_unstable();
        Self(RootBus::of_nodes(&without_segment))
    }

    /// The root bus of a NIC, if it is on one of these.
    pub(crate) fn of(&self, net: &NetConfig) -> Option<RootBus> {
        let node = net.numa.filter(|_| net.pci_segment == 0)?;
        self.0.iter().find(|root| root.node == node).copied()
    }

    /// The number of a NIC's root bus within its segment.
    pub(crate) fn bus_of(&self, net: &NetConfig) -> u8 {
        self.of(net).map_or(0, |root| root.bus)
    }

    /// The number of buses for VFs behind the root bus of a NIC of segment 0, and whose they are.
    pub(crate) fn vf_buses_of(&self, net: &NetConfig) -> (String, u16) {
        match self.of(net) {
            Some(root) => (format!("node {}", root.node), u16::from(root.last.saturating_sub(root.bus))),
            None if self.0.is_empty() => ("the VM".to_string(), RootBus::last_before(&self.0).into()),
            None => ("bus 0".to_string(), RootBus::last_before(&self.0).into()),
        }
    }

    /// The root buses.
    pub(crate) fn into_buses(self) -> Vec<RootBus> {
        self.0
    }
}

fn no_such_node(nodes: usize) -> Problem {
    Problem::Missing(match nodes.checked_sub(1) {
        None => "the VM has no NUMA nodes; add --numa guest_numa_id=0 and further ones, or leave numa out".to_string(),
        Some(0) => "the VM has NUMA node 0 alone; give 0, or add nodes with --numa".to_string(),
        Some(last) => format!("the VM has NUMA nodes 0 to {last}; give one of them, or add nodes with --numa"),
    })
}

#[cfg(test)]
mod tests {
    use vm_api::config::VmConfig;

    use crate::config::{PlannedVm, VmPlan};

    /// A VM with these nodes, NICs and number of segments.
    fn config(nodes: &[&str], nets: &[&str], segments: u16) -> VmConfig {
        VmConfig {
            numa: nodes.iter().map(|node| node.parse().unwrap()).collect(),
            net: nets.iter().map(|net| net.parse().unwrap()).collect(),
            platform: Some(format!("num_pci_segments={segments}").parse().unwrap()),
            ..VmConfig::default()
        }
    }

    fn planned(nodes: &[&str], nets: &[&str], segments: u16) -> Result<VmPlan, String> {
        VmPlan::of(&config(nodes, nets, segments)).map_err(|error| error.to_string())
    }

    /// The root buses of the VM's NICs.
    fn buses(plan: &VmPlan) -> Vec<u8> {
        plan.devices.iter().filter(|device| device.net().is_some()).map(|device| device.root_bus()).collect()
    }

    #[test]
    fn nics_are_on_the_root_buses_of_their_nodes() {
        let nodes = ["guest_numa_id=1", "guest_numa_id=0", "guest_numa_id=2,pci_segments=[1]"];
        let nets = ["numa=0", "numa=1", "numa=2", "id=d", "numa=2,pci_segment=1"];
        let plan = planned(&nodes, &nets, 2).unwrap();
        assert_eq!((buses(&plan), plan.roots.len()), (vec![0x20, 0x40, 0x60, 0, 0], 3));
        // The node of segment 0 needs none, and the others' numbers follow.
        let nodes = ["guest_numa_id=0,pci_segments=[0]", "guest_numa_id=1", "guest_numa_id=2"];
        let plan = planned(&nodes, &nets[..3], 1).unwrap();
        assert_eq!(buses(&plan), [0, 0x40, 0x60]);
        assert_eq!(buses(&planned(&nodes, &nets[2..3], 1).unwrap()), [0x60], "whatever other NICs there are");
    }

    #[test]
    fn a_vm_whose_nics_need_no_root_bus_has_none() {
        let nodes = ["guest_numa_id=0,pci_segments=[0]", "guest_numa_id=1,pci_segments=[1]"];
        for nets in [&["id=a,sriov_vfs=8"][..], &["numa=0"], &["numa=1,pci_segment=1"]] {
            let plan = planned(&nodes, nets, 2).unwrap();
            assert!(plan.roots.is_empty() && plan.roots_in_use().is_empty(), "{nets:?}");
        }
    }

    #[test]
    fn a_slot_is_taken_on_its_own_root_bus_alone() {
        let nodes = ["guest_numa_id=0", "guest_numa_id=1"];
        let nets = ["id=a,pci_device_id=5", "id=b,pci_device_id=5,numa=0", "id=c,pci_device_id=5,numa=1"];
        planned(&nodes, &nets, 1).unwrap();
        planned(&nodes, &["pci_device_id=0,numa=1"], 1).unwrap();
        assert_eq!(
            planned(&nodes, &["id=a,pci_device_id=5,numa=1", "id=b,pci_device_id=5,numa=1"], 1).unwrap_err(),
            "--net id=b,pci_device_id=5: slot 5 is already in use by a; give another, or leave pci_device_id out"
        );
        let many: Vec<_> = (0..62).map(|n| format!("id=n{n},numa={}", n % 2)).collect();
        let mut many: Vec<_> = many.iter().map(String::as_str).collect();
        planned(&nodes, &many, 1).unwrap();
        many.push("id=more,numa=1");
        let refused = planned(&nodes, &many, 1).unwrap_err();
        assert!(refused.starts_with("--net (32 of them): bus 96 has slots for 31 devices"), "{refused}");
    }

    #[test]
    fn vfs_need_buses_behind_their_pfs_root_bus() {
        let nodes = ["guest_numa_id=0,pci_segments=[0]", "guest_numa_id=1"];
        planned(&nodes, &["numa=0,sriov_vfs=16128", "numa=1,sriov_vfs=16128"], 1).unwrap();
        assert_eq!(
            planned(&nodes, &["id=a,numa=1,sriov_vfs=16000", "id=b,numa=1,sriov_vfs=257"], 1).unwrap_err(),
            "--net id=b,sriov_vfs=257: takes 2 of node 1's 63 buses for VFs, but 0 are free; reserve fewer"
        );
        assert_eq!(
            planned(&nodes, &["id=a,numa=1", "id=b,sriov_vfs=16129"], 1).unwrap_err(),
            "--net id=b,sriov_vfs=16129: takes 64 of bus 0's 63 buses for VFs, but 63 are free; reserve fewer"
        );
        let many: Vec<_> = (0..64).map(|id| format!("guest_numa_id={id}")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        planned(&many, &["numa=63"], 1).unwrap();
        assert_eq!(
            planned(&many, &["id=a,numa=63,sriov_vfs=1"], 1).unwrap_err(),
            "--net id=a,sriov_vfs=1: takes 1 of node 63's 0 buses for VFs, but 0 are free; reserve fewer"
        );
        assert_eq!(
            planned(&many, &["id=a,numa=63"], 33).unwrap_err(),
            "--net id=a,numa=63: each PCI segment and each NUMA node without segment 0 needs a host bridge, 97 \
             together, and a VM has at most 96; give fewer segments or nodes"
        );
        planned(&many, &["numa=63"], 32).unwrap();
    }

    #[test]
    fn a_node_that_a_nic_cannot_be_on_is_refused() {
        let two = ["guest_numa_id=0", "guest_numa_id=1,pci_segments=[1]"];
        for (nodes, net, expected) in [
            (
                &[][..],
                "id=a,numa=0",
                "--net id=a,numa=0: the VM has no NUMA nodes; add --numa guest_numa_id=0 and further ones, or leave \
                 numa out",
            ),
            (
                &two[..1],
                "id=a,numa=1",
                "--net id=a,numa=1: the VM has NUMA node 0 alone; give 0, or add nodes with --numa",
            ),
            (
                &two,
                "id=a,numa=4294967295",
                "--net id=a,numa=4294967295: the VM has NUMA nodes 0 to 1; give one of them, or add nodes with --numa",
            ),
            (
                &two,
                "id=a,numa=0,pci_segment=1",
                "--net id=a,numa=0: PCI segment 1 is not on this node; leave pci_segment out, or give the node the \
                 segment by --numa guest_numa_id=0,pci_segments=[1]",
            ),
        ] {
            assert_eq!(planned(nodes, &[net], 2).unwrap_err(), expected);
        }
        planned(&two, &["numa=1,pci_segment=1"], 2).unwrap();
    }

    #[test]
    fn a_kept_slot_is_of_its_root_bus() {
        let of = |nets: &[&str]| {
            let config = VmConfig { watchdog: true, ..config(&["guest_numa_id=0"], nets, 1) };
            PlannedVm::new(config).unwrap()
        };
        let mut before = of(&["id=a,numa=0"]);
        before.set_slot("__watchdog", 4);
        let mut after = of(&["id=a,numa=0", "id=b,numa=0,pci_device_id=4"]);
        after.keep_slots(before.plan());
        let watchdog = after.plan().devices.iter().find(|device| device.id == "__watchdog").unwrap();
        assert_eq!(watchdog.pci_device_id, Some(4));
    }
}
