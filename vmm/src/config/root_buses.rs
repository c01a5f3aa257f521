//! The root buses of segment 0 for NICs on NUMA nodes (`--net numa=`).
//!
//! Bus 0 has one host bridge, so all its devices are on one node. If a NIC is to be on another node, every node gets a
//! root bus with a host bridge of its own, except the node that has segment 0 itself. Their numbers depend on the number
//! of nodes alone, not on the NICs, so that they stay the same when NICs come and go.

use vm_api::config::NetConfig;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::option::Options as _;

use crate::arch::x86_64::layout::MOST_SEGMENTS;
use crate::config::numa::NumaNode;
use crate::config::subject::Subject;
use crate::pci_layout::RootBus;

/// The root buses of segment 0 other than bus 0, by ascending numbers; none if no NIC needs one.
#[derive(Debug, Default)]
pub(crate) struct RootBuses(Vec<RootBus>);

impl RootBuses {
    /// Plans the root buses of a VM with these NICs, nodes and number of PCI segments.
    ///
    /// # Errors
    ///
    /// Fails if a NIC is to be on a node that there is not, or that its segment is not on, or if there would be too many
    /// root buses.
    pub(crate) fn plan(nets: &[NetConfig], nodes: &[NumaNode], segments: u16) -> Result<Self, ConfigError> {
        let mut first = None;
        for (index, net) in nets.iter().enumerate() {
            let Some(node) = net.numa else { continue };
            let option = || Subject::device(NetConfig::OPTION, net.id.as_deref(), index, nets.len()).key("numa", node);
            let planned = usize::try_from(node).ok().and_then(|node| nodes.get(node));
            let planned = planned.ok_or_else(|| ConfigError::new(option(), no_such_node(nodes.len())))?;
            match net.pci_segment {
                segment if planned.segments.contains(&segment) => {}
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
        let without_segment = (0..).zip(nodes).filter(|(_, node)| !node.segments.contains(&0)).map(|(id, _)| id);
        let without_segment: Vec<u32> = without_segment.collect();
        let bridges = usize::from(segments) + without_segment.len();
        if bridges > usize::from(MOST_SEGMENTS) {
            let what = format!(
                "each PCI segment and each NUMA node without segment 0 needs a host bridge, {bridges} together, and a VM \
                 has at most {MOST_SEGMENTS}; give fewer segments or nodes"
            );
            return Err(ConfigError::new(option, Problem::Limit(what)));
        }
        Ok(Self(RootBus::of_nodes(&without_segment)))
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
