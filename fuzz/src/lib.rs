//! Operations of a guest or a user on the crates, in any order, and checks after each step.
//!
//! Each target is a module. `run` decodes an input into operations, performs them, and panics if a check fails. `seeds`
//! are inputs that lead to the interesting states, as a real driver would. Targets use no threads and no timers, and
//! sockets only if they own both ends, so the same input always has the same effect.

pub mod api;
pub mod balloon;
pub mod bar_moves;
pub mod block;
pub mod config_space;
pub mod console;
pub mod ecam;
pub mod event_device;
pub mod guest;
pub mod input;
pub mod machine_state;
pub mod mem;
pub mod memory_ranges;
pub mod migration_wire;
pub mod msix;
pub mod net_ctrl;
pub mod net_queue;
pub mod payload;
pub mod policy;
pub mod qcow2_open;
pub mod rng;
pub mod saved_state;
pub mod serial;
pub mod sriov;
pub mod switch;
pub mod transport;
pub mod vhost_user;
pub mod viommu;
pub mod vm_config;
pub mod vsock;

/// A fuzz target.
pub struct Target {
    /// Name of the target and of its binary.
    pub name: &'static str,
    /// Runs an input.
    pub run: fn(&[u8]),
    /// Seeds.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "api", run: api::run, seeds: api::seeds },
    Target { name: "balloon", run: balloon::run, seeds: balloon::seeds },
    Target { name: "bar_moves", run: bar_moves::run, seeds: bar_moves::seeds },
    Target { name: "block", run: block::run, seeds: block::seeds },
    Target { name: "config_space", run: config_space::run, seeds: config_space::seeds },
    Target { name: "console", run: console::run, seeds: console::seeds },
    Target { name: "ecam", run: ecam::run, seeds: ecam::seeds },
    Target { name: "event_device", run: event_device::run, seeds: event_device::seeds },
    Target { name: "machine_state", run: machine_state::run, seeds: machine_state::seeds },
    Target { name: "mem", run: mem::run, seeds: mem::seeds },
    Target { name: "memory_ranges", run: memory_ranges::run, seeds: memory_ranges::seeds },
    Target { name: "migration_wire", run: migration_wire::run, seeds: migration_wire::seeds },
    Target { name: "msix", run: msix::run, seeds: msix::seeds },
    Target { name: "net_ctrl", run: net_ctrl::run, seeds: net_ctrl::seeds },
    Target { name: "net_queue", run: net_queue::run, seeds: net_queue::seeds },
    Target { name: "payload", run: payload::run, seeds: payload::seeds },
    Target { name: "policy", run: policy::run, seeds: policy::seeds },
    Target { name: "qcow2_open", run: qcow2_open::run, seeds: qcow2_open::seeds },
    Target { name: "rng", run: rng::run, seeds: rng::seeds },
    Target { name: "saved_state", run: saved_state::run, seeds: saved_state::seeds },
    Target { name: "serial", run: serial::run, seeds: serial::seeds },
    Target { name: "sriov", run: sriov::run, seeds: sriov::seeds },
    Target { name: "switch", run: switch::run, seeds: switch::seeds },
    Target { name: "transport", run: transport::run, seeds: transport::seeds },
    Target { name: "vhost_user", run: vhost_user::run, seeds: vhost_user::seeds },
    Target { name: "viommu", run: viommu::run, seeds: viommu::seeds },
    Target { name: "vm_config", run: vm_config::run, seeds: vm_config::seeds },
    Target { name: "vsock", run: vsock::run, seeds: vsock::seeds },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_seeds_and_takes_them_whole_and_cut_short() {
        for Target { name, run, seeds } in TARGETS {
            let seeds = seeds();
            assert!(!seeds.is_empty(), "{name}");
            run(&[]);
            for seed in seeds {
                run(&seed);
                run(&seed[..seed.len() / 2]);
            }
        }
    }

    #[test]
    fn every_target_is_a_binary_of_this_package() {
        let manifest = include_str!("../Cargo.toml");
        for Target { name, .. } in TARGETS {
            assert!(manifest.contains(&format!("name = \"{name}\"\npath = \"fuzz_targets/{name}.rs\"")), "{name}");
        }
        assert_eq!(manifest.matches("fuzz_targets/").count(), TARGETS.len());
    }
}
