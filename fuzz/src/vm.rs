//! A VM as its clients, its kernel image and the source of a migration see it.

pub mod api;
pub mod machine_state;
pub mod memory_ranges;
pub mod migration_wire;
pub mod payload;
pub mod serial;
pub mod vm_config;
