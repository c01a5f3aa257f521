//! Tests of the REST API with the real command and its clients' requests. Guests consist of a few instructions and run
//! on the machine's own KVM.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../../vmm/src/migration/tls/testing.rs"]
mod certificates;
mod clients;
mod confinement;
mod disks;
mod drop_in;
#[path = "../../xtask/src/error.rs"]
#[expect(dead_code, reason = "what makes disks only passes errors on")]
mod error;
mod faults;
#[path = "../cli/files.rs"]
#[expect(dead_code, reason = "these tests use only one of the kernels")]
mod files;
mod firmware;
#[path = "../../xtask/src/lab/gpt.rs"]
mod gpt;
mod guides;
mod hyperv;
mod legacy;
mod limits;
mod memory;
mod migration;
#[path = "../integration/src/migration_wire.rs"]
#[expect(unreachable_pub, reason = "it is a part of the harness of guests in the lab, too")]
mod migration_wire;
mod net;
mod on_off;
mod readme;
mod refused;
mod registry_client;
#[path = "../integration/src/repeat.rs"]
#[expect(dead_code, unreachable_pub, reason = "it is a part of the harness of guests in the lab, too")]
mod repeat;
mod rig;
mod rotation;
mod snapshot;
mod templates;
#[path = "../../vmm/tests/common/mod.rs"]
mod tiny;
mod tpm;
mod unlogged;
mod vsock;
