//! The rules for NUMA nodes, and their plan.

use std::collections::HashMap;

use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::{NumaConfig, VmConfig};

use crate::config::device::DevicePlan;

/// The most nodes: their distances take as many bytes as the square of their number.
const MOST_NODES: usize = 64;
/// The distance of a node to itself (`ACPI 6.5 §5.2.17`).
const LOCAL: u8 = 10;
/// The distance to another node if none is given.
const REMOTE: u8 = 20;

/// A NUMA node of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// vCPUs of the node.
    pub vcpus: Vec<u8>,
    /// The indexes of the node's parts of the memory.
    pub parts: Vec<usize>,
    /// PCI segments of the node.
    pub segments: Vec<u16>,
    /// The name of the device whose node this is.
    pub device: Option<String>,
    /// The distances to all nodes, by number.
    pub distances: Vec<u8>,
}

/// Plans the nodes, by number, of a VM with this number of PCI segments. [`check_devices`] completes the checks. vCPUs
/// and zones that nodes name but the VM does not have are left out, with a line in `warnings`, as in Cloud Hypervisor.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan(config: &VmConfig, segments: u16, warnings: &mut Vec<String>) -> Result<Vec<NumaNode>, ConfigError> {
    let count = config.numa.len();
    if count > MOST_NODES {
        let what = format!("a VM has at most {MOST_NODES} NUMA nodes; give fewer");
        return Err(ConfigError::new(format!("--numa: {count} nodes"), Problem::Limit(what)));
    }
    let mut nodes: Vec<Option<NumaNode>> = vec![None; count];
    let (mut vcpus, mut zones, mut buses) = (HashMap::new(), HashMap::new(), HashMap::new());
    for given in &config.numa {
        let option = |key: &str, value: &str| format!("--numa guest_numa_id={},{key}=[{value}]", given.guest_numa_id);
        let place = usize::try_from(given.guest_numa_id).ok().and_then(|id| nodes.get_mut(id));
        let id = given.guest_numa_id;
        let place = match place {
            Some(place @ None) => place,
            Some(Some(_)) => return Err(wrong_node(id, "another node has this number; give each its own".to_string())),
            None => {
                let what = format!("nodes have the numbers from 0 on, without gaps; give {} or less", count - 1);
                return Err(wrong_node(id, what));
            }
        };
        let mut node = NumaNode { device: given.device_id.clone(), ..NumaNode::default() };
        node.vcpus = vcpus_of(given, config.cpus.max_vcpus, &mut vcpus, warnings);
        for zone in &given.memory_zones {
            let option = || option("memory_zones", zone);
            let Some(part) = config.memory.zones.iter().position(|other| other.id == *zone) else {
                warnings.push(format!("{}: there is no such memory zone (--memory-zone); the node has none", option()));
                continue;
            };
            once(&mut zones, part, id, option)?;
            node.parts.push(part);
        }
        for segment in &given.pci_segments {
            let option = || option("pci_segments", &segment.to_string());
            if *segment >= segments {
                let what = format!("the VM has {segments} (--platform num_pci_segments); give one of these, from 0 on");
                return Err(ConfigError::new(option(), Problem::Limit(what)));
            }
            once(&mut buses, *segment, id, option)?;
            node.segments.push(*segment);
        }
        node.distances = distances(given, count)?.into_iter().map(|distance| distance.unwrap_or(0)).collect();
        *place = Some(node);
    }
    let mut nodes: Vec<_> = nodes.into_iter().flatten().collect();
    fill_in_distances(&mut nodes);
    match nodes.first_mut() {
        Some(first) if config.memory.zones.is_empty() => first.parts.push(0),
        Some(first) => {
            // If the tables left memory out, the guest would not use any node.
            for (part, zone) in (0..).zip(&config.memory.zones).filter(|(part, _)| !zones.contains_key(part)) {
                warnings.push(format!("--memory-zone id={}: belongs to no NUMA node; node 0 gets it", zone.id));
                first.parts.push(part);
            }
        }
        None => {}
    }
    Ok(nodes)
}

/// The vCPUs of a node. `taken` maps the vCPUs of previous nodes to their nodes.
fn vcpus_of(given: &NumaConfig, max: u32, taken: &mut HashMap<u32, u32>, warnings: &mut Vec<String>) -> Vec<u8> {
    let id = given.guest_numa_id;
    let mut vcpus = Vec::new();
    for vcpu in &given.cpus {
        let option = || format!("--numa guest_numa_id={id},cpus=[{vcpu}]");
        match (u8::try_from(*vcpu).ok().filter(|_| *vcpu < max), taken.get(vcpu)) {
            (None, _) => {
                let last = max.saturating_sub(1);
                warnings.push(format!("{}: the VM has vCPUs 0 to {last} (--cpus max={max}); it is left out", option()));
            }
            (Some(_), Some(node)) => warnings.push(format!("{}: node {node} has it already, and keeps it", option())),
            (Some(number), None) => {
                taken.insert(*vcpu, id);
                vcpus.push(number);
            }
        }
    }
    vcpus
}

fn wrong_node(id: u32, what: String) -> ConfigError {
    ConfigError::new(format!("--numa guest_numa_id={id}"), Problem::Conflict(what))
}

/// Notes that the node `id` has `thing`.
///
/// # Errors
///
/// Fails if another node has it.
fn once<T: std::hash::Hash + Eq>(
    nodes: &mut HashMap<T, u32>,
    thing: T,
    id: u32,
    option: impl FnOnce() -> String,
) -> Result<(), ConfigError> {
    match nodes.insert(thing, id) {
        None => Ok(()),
        Some(other) => {
            let what = format!("node {other} has it already; name it once");
            Err(ConfigError::new(option(), Problem::Conflict(what)))
        }
    }
}

/// The distances that a node gives, by the other node.
fn distances(given: &NumaConfig, count: usize) -> Result<Vec<Option<u8>>, ConfigError> {
    let mut distances = vec![None; count];
    for one in &given.distances {
        let (destination, distance) = (one.destination, one.distance);
        let fail = |what: &str| {
            let id = given.guest_numa_id;
            let option = format!("--numa guest_numa_id={id},distances=[{destination}@{distance}]");
            Err(ConfigError::new(option, Problem::Value(what.to_string())))
        };
        let place = usize::try_from(destination).ok().and_then(|destination| distances.get_mut(destination));
        let Some(place) = place else { return fail("there is no such node; give the number of one") };
        if destination == given.guest_numa_id && distance != LOCAL {
            return fail("the distance of a node to itself is 10; leave it out");
        }
        if destination != given.guest_numa_id && distance <= LOCAL {
            return fail("another node is farther away than the node itself, 10; give 11 to 255");
        }
        if place.replace(distance).is_some_and(|before| before != distance) {
            return fail("this node has another distance already; give one");
        }
    }
    Ok(distances)
}

/// Sets the distances that are 0, which were not given in this direction.
fn fill_in_distances(nodes: &mut [NumaNode]) {
    let given: Vec<_> = nodes.iter().map(|node| node.distances.clone()).collect();
    for (from, node) in nodes.iter_mut().enumerate() {
        for (to, distance) in node.distances.iter_mut().enumerate().filter(|(_, distance)| **distance == 0) {
            let back = given.get(to).and_then(|back| back.get(from)).copied().filter(|back| *back != 0);
            *distance = if from == to { LOCAL } else { back.unwrap_or(REMOTE) };
        }
    }
}

/// Checks that the devices that nodes name exist.
///
/// # Errors
///
/// Fails with the first device that does not exist, or that two nodes name.
pub(crate) fn check_devices(nodes: &[NumaNode], devices: &[DevicePlan]) -> Result<(), ConfigError> {
    let mut named = HashMap::new();
    for (id, name) in (0..).zip(nodes).filter_map(|(id, node)| Some((id, node.device.as_ref()?))) {
        let option = || format!("--numa guest_numa_id={id},device_id={name}");
        if !devices.iter().any(|device| device.id == *name) {
            let what = "there is no such device; give the id of one, or leave it out".to_string();
            return Err(ConfigError::new(option(), Problem::Missing(what)));
        }
        once(&mut named, name, id, option)?;
    }
    Ok(())
}

/// The node that has a part of the memory.
pub(crate) fn of_part(nodes: &[NumaNode], part: usize) -> Option<u16> {
    (0..).zip(nodes).find(|(_, node)| node.parts.contains(&part)).map(|(id, _)| id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(nodes: &[&str], zones: &[&str]) -> VmConfig {
        let mut config = VmConfig { cpus: "boot=1,max=8".parse().unwrap(), ..VmConfig::default() };
        config.numa = nodes.iter().map(|node| node.parse().unwrap()).collect();
        config.memory.zones = zones.iter().map(|zone| zone.parse().unwrap()).collect();
        config
    }

    /// The nodes of a configuration that needs no warning.
    fn nodes_of(config: &VmConfig, segments: u16) -> Vec<NumaNode> {
        let mut warnings = Vec::new();
        let nodes = plan(config, segments, &mut warnings).unwrap();
        assert_eq!(warnings, [""; 0]);
        nodes
    }

    const ZONES: [&str; 2] = ["id=a,size=1G", "id=b,size=1G"];

    #[test]
    fn numa_nodes_are_sorted_by_number_with_all_their_resources() {
        let given = [
            "guest_numa_id=1,cpus=[1,4-7],memory_zones=[b],pci_segments=[1]",
            "guest_numa_id=0,cpus=[0,2-3],memory_zones=[a],pci_segments=[0],device_id=_net0",
        ];
        let nodes = nodes_of(&config(&given, &ZONES), 2);
        let expected = [
            NumaNode {
                vcpus: vec![0, 2, 3],
                parts: vec![0],
                segments: vec![0],
                device: Some("_net0".to_string()),
                distances: vec![10, 20],
            },
            NumaNode {
                vcpus: vec![1, 4, 5, 6, 7],
                parts: vec![1],
                segments: vec![1],
                device: None,
                distances: vec![20, 10],
            },
        ];
        assert_eq!(nodes, expected);
        assert_eq!((of_part(&nodes, 1), of_part(&nodes, 2)), (Some(1), None));
        assert!(nodes_of(&config(&[], &ZONES), 1).is_empty());
    }

    #[test]
    fn distance_is_symmetric_unless_both_directions_are_given() {
        let given =
            ["guest_numa_id=0,distances=[1@30,2@40]", "guest_numa_id=1", "guest_numa_id=2,distances=[0@50,2@10]"];
        let nodes = nodes_of(&config(&given, &[]), 1);
        let distances: Vec<_> = nodes.iter().map(|node| node.distances.as_slice()).collect();
        assert_eq!(distances, [[10, 30, 40], [30, 10, 20], [50, 20, 10]]);
    }

    #[test]
    fn memory_without_zones_is_that_of_node_0() {
        let nodes = nodes_of(&config(&["guest_numa_id=1,cpus=[0]", "guest_numa_id=0"], &[]), 1);
        assert_eq!((&nodes[0].parts[..], &nodes[1].parts[..]), (&[0][..], &[][..]));
    }

    /// Nodes, the warnings about them, and the vCPUs and parts of each.
    type Case<'a> = (&'a [&'a str], &'a [&'a str], [&'a [u8]; 2], [&'a [usize]; 2]);

    #[test]
    fn a_node_leaves_out_missing_cpus_and_zones_with_a_warning() {
        let cases: [Case<'_>; 4] = [
            (
                &["guest_numa_id=0,cpus=[0,8],memory_zones=[a]", "guest_numa_id=1,memory_zones=[b]"],
                &["--numa guest_numa_id=0,cpus=[8]: the VM has vCPUs 0 to 7 (--cpus max=8); it is left out"],
                [&[0], &[]],
                [&[0], &[1]],
            ),
            (
                &["guest_numa_id=0,cpus=[1],memory_zones=[a]", "guest_numa_id=1,cpus=[0-2],memory_zones=[b]"],
                &["--numa guest_numa_id=1,cpus=[1]: node 0 has it already, and keeps it"],
                [&[1], &[0, 2]],
                [&[0], &[1]],
            ),
            (
                &["guest_numa_id=0,memory_zones=[a]", "guest_numa_id=1,memory_zones=[c,b]"],
                &["--numa guest_numa_id=1,memory_zones=[c]: there is no such memory zone (--memory-zone); the \
                   node has none"],
                [&[], &[]],
                [&[0], &[1]],
            ),
            (
                &["guest_numa_id=0", "guest_numa_id=1,memory_zones=[a]"],
                &["--memory-zone id=b: belongs to no NUMA node; node 0 gets it"],
                [&[], &[]],
                [&[1], &[0]],
            ),
        ];
        for (given, said, vcpus, parts) in cases {
            let mut warnings = Vec::new();
            let nodes = plan(&config(given, &ZONES), 1, &mut warnings).unwrap();
            assert_eq!(warnings, said);
            for (node, (vcpus, parts)) in nodes.iter().zip(vcpus.into_iter().zip(parts)) {
                assert_eq!((&node.vcpus[..], &node.parts[..]), (vcpus, parts));
            }
        }
    }

    #[test]
    fn nodes_that_cannot_be_are_refused() {
        for (nodes, expected) in [
            (
                &["guest_numa_id=1,memory_zones=[a,b]"][..],
                "--numa guest_numa_id=1: nodes have the numbers from 0 on, without gaps; give 0 or less",
            ),
            (
                &["guest_numa_id=0", "guest_numa_id=0"],
                "--numa guest_numa_id=0: another node has this number; give each its own",
            ),
            (
                &["guest_numa_id=0,pci_segments=[1]"],
                "--numa guest_numa_id=0,pci_segments=[1]: the VM has 1 (--platform num_pci_segments); give one of \
                 these, from 0 on",
            ),
            (
                &["guest_numa_id=0,distances=[1@20]"],
                "--numa guest_numa_id=0,distances=[1@20]: there is no such node; give the number of one",
            ),
            (
                &["guest_numa_id=0,distances=[0@20]"],
                "--numa guest_numa_id=0,distances=[0@20]: the distance of a node to itself is 10; leave it out",
            ),
            (
                &["guest_numa_id=0,distances=[1@10]", "guest_numa_id=1"],
                "--numa guest_numa_id=0,distances=[1@10]: another node is farther away than the node itself, 10; give \
                 11 to 255",
            ),
            (
                &["guest_numa_id=0,distances=[1@30,1@31]", "guest_numa_id=1"],
                "--numa guest_numa_id=0,distances=[1@31]: this node has another distance already; give one",
            ),
        ] {
            assert_eq!(plan(&config(nodes, &ZONES), 1, &mut Vec::new()).unwrap_err().to_string(), expected);
        }
        let many: Vec<_> = (0..65).map(|id| format!("guest_numa_id={id}")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let refused = plan(&config(&many, &[]), 1, &mut Vec::new()).unwrap_err().to_string();
        assert_eq!(refused, "--numa: 65 nodes: a VM has at most 64 NUMA nodes; give fewer");
    }

    #[test]
    fn a_device_has_one_node_and_has_to_be_there() {
        let node = |device: &str| NumaNode { device: Some(device.to_string()), ..NumaNode::default() };
        let devices = crate::config::VmPlan::of(&VmConfig::default()).unwrap().devices;
        check_devices(&[NumaNode::default(), node("__rng")], &devices).unwrap();
        assert_eq!(
            check_devices(&[node("x")], &devices).unwrap_err().to_string(),
            "--numa guest_numa_id=0,device_id=x: there is no such device; give the id of one, or leave it out"
        );
        let twice = check_devices(&[node("__rng"), node("__rng")], &devices).unwrap_err().to_string();
        assert_eq!(twice, "--numa guest_numa_id=1,device_id=__rng: node 0 has it already; name it once");
    }
}
