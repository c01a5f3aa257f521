//! The NUMA nodes of the guest: `--numa`.

use option_derive::{Options, Schema};
use serde::{Deserialize, Serialize};

use crate::config::grammar::list;
use crate::config::value::{Value, digits};

/// A NUMA node of the guest. A vCPU, memory zone or PCI segment belongs to at most one node. Memory zones that no node
/// names belong to node 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--numa")]
pub struct NumaConfig {
    /// Number of the node. Nodes are numbered from 0.
    #[option("guest_numa_id=<number>", required)]
    #[schema(maximum = 63)]
    pub guest_numa_id: u32,
    /// vCPUs of the node, such as [0-3,8].
    #[option("cpus=[<number or range>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(items(maximum = 253))]
    #[schema(about = "vCPUs of the node, by number, up to max_vcpus.")]
    pub cpus: Vec<u32>,
    /// Distances to other nodes, 11 to 255, such as [1@20,2@30]. By default that of the opposite direction, or 20.
    #[option("distances=[<node>@<distance>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(about = "Distances to other nodes, 11 to 255. By default that of the opposite direction, or 20.")]
    pub distances: Vec<NumaDistance>,
    /// Memory zones of the node (--memory-zone). Memory without zones belongs to node 0.
    #[option("memory_zones=[<name>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub memory_zones: Vec<String>,
    /// PCI segments of the node.
    #[option("pci_segments=[<number>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(items(maximum = 95))]
    pub pci_segments: Vec<u16>,
    /// Device that belongs to this node (a generic initiator), such as an accelerator with its own memory.
    #[option("device_id=<name>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_id: Option<String>,
}

/// The distance from a NUMA node to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
pub struct NumaDistance {
    /// Number of the other node.
    #[schema(maximum = 63)]
    pub destination: u32,
    /// The distance: 10 from a node to itself, more to others.
    #[schema(minimum = 10)]
    pub distance: u8,
}

/// A list of distances, such as `[1@20,2@30]`.
impl Value for Vec<NumaDistance> {
    fn parse(text: &str) -> Result<Self, String> {
        let one = |text: &String| {
            let (destination, distance) = text.split_once('@')?;
            let (destination, distance) = (digits(destination)?.parse().ok()?, digits(distance)?.parse().ok()?);
            Some(NumaDistance { destination, distance })
        };
        let distances = list(text)?.iter().map(one).collect::<Option<Self>>();
        distances.ok_or_else(|| "give a list of nodes and distances up to 255, such as [1@20,2@30]".to_string())
    }

    fn print(&self) -> Option<String> {
        let one = |NumaDistance { destination, distance }: &NumaDistance| format!("{destination}@{distance}");
        (!self.is_empty()).then(|| format!("[{}]", self.iter().map(one).collect::<Vec<_>>().join(",")))
    }
}
