//! Operations of a guest or a user on the crates, in any order, and checks after each step.
//!
//! Each target is a module. `run` decodes an input into operations, performs them, and panics if a check fails. `seeds`
//! are inputs that lead to the interesting states, as a real driver would. Targets use no threads and no timers, and
//! sockets only if they own both ends, so the same input always has the same effect.

pub mod devices;
pub mod functions;
pub mod guest;
pub mod input;
pub mod vm;

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
    Target { name: "api", run: vm::api::run, seeds: vm::api::seeds },
    Target { name: "balloon", run: devices::balloon::run, seeds: devices::balloon::seeds },
    Target { name: "bar_moves", run: functions::bar_moves::run, seeds: functions::bar_moves::seeds },
    Target { name: "block", run: devices::block::run, seeds: devices::block::seeds },
    Target { name: "config_space", run: functions::config_space::run, seeds: functions::config_space::seeds },
    Target { name: "console", run: devices::console::run, seeds: devices::console::seeds },
    Target { name: "ecam", run: functions::ecam::run, seeds: functions::ecam::seeds },
    Target { name: "event_device", run: devices::event_device::run, seeds: devices::event_device::seeds },
    Target { name: "guest_channel", run: devices::guest_channel::run, seeds: devices::guest_channel::seeds },
    Target { name: "machine_state", run: vm::machine_state::run, seeds: vm::machine_state::seeds },
    Target { name: "mem", run: devices::mem::run, seeds: devices::mem::seeds },
    Target { name: "memory_ranges", run: vm::memory_ranges::run, seeds: vm::memory_ranges::seeds },
    Target { name: "migration_wire", run: vm::migration_wire::run, seeds: vm::migration_wire::seeds },
    Target { name: "msix", run: functions::msix::run, seeds: functions::msix::seeds },
    Target { name: "net_ctrl", run: devices::net_ctrl::run, seeds: devices::net_ctrl::seeds },
    Target { name: "net_queue", run: devices::net_queue::run, seeds: devices::net_queue::seeds },
    Target { name: "payload", run: vm::payload::run, seeds: vm::payload::seeds },
    Target { name: "policy", run: devices::policy::run, seeds: devices::policy::seeds },
    Target { name: "qcow2_open", run: devices::qcow2_open::run, seeds: devices::qcow2_open::seeds },
    Target { name: "rng", run: devices::rng::run, seeds: devices::rng::seeds },
    Target { name: "saved_state", run: functions::saved_state::run, seeds: functions::saved_state::seeds },
    Target { name: "serial", run: vm::serial::run, seeds: vm::serial::seeds },
    Target { name: "sriov", run: functions::sriov::run, seeds: functions::sriov::seeds },
    Target { name: "switch", run: devices::switch::run, seeds: devices::switch::seeds },
    Target { name: "transport", run: functions::transport::run, seeds: functions::transport::seeds },
    Target { name: "vhost_user", run: devices::vhost_user::run, seeds: devices::vhost_user::seeds },
    Target { name: "viommu", run: devices::viommu::run, seeds: devices::viommu::seeds },
    Target { name: "vm_config", run: vm::vm_config::run, seeds: vm::vm_config::seeds },
    Target { name: "vsock", run: devices::vsock::run, seeds: devices::vsock::seeds },
    Target { name: "x550_descriptors", run: devices::x550::descriptors::run, seeds: devices::x550::descriptors::seeds },
    Target { name: "x550_mailbox", run: devices::x550::mailbox::run, seeds: devices::x550::mailbox::seeds },
    Target { name: "x550_registers", run: devices::x550::registers::run, seeds: devices::x550::registers::seeds },
    Target { name: "x550_steering", run: devices::x550::steering::run, seeds: devices::x550::steering::seeds },
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
            let has_path =
                |folder| manifest.contains(&format!("\"{name}\"\npath = \"fuzz_targets/{folder}/{name}.rs\""));
            assert!(["devices", "functions", "vm"].into_iter().any(has_path), "{name}");
        }
        assert_eq!(manifest.matches("fuzz_targets/").count(), TARGETS.len());
    }
}
