//! The schemas of `api/openapi.yaml`.

use crate::schema::{Components, Definition};
use crate::{body, config, info, migration};

/// The schemas of all requests and replies.
pub fn components() -> Vec<Definition> {
    let mut components = Components::default();
    let all = &mut components;
    all.reference::<info::VmmPingResponse>();
    all.reference::<info::VmInfo>();
    all.reference::<info::PciDeviceInfo>();
    all.reference::<body::SetVf>();
    all.reference::<body::RemoveDevice>();
    all.reference::<body::Resize>();
    all.reference::<body::ResizeZone>();
    all.reference::<body::ResizeDisk>();
    all.reference::<body::InjectFault>();
    all.reference::<body::SnapshotConfig>();
    all.reference::<config::RestoreConfig>();
    all.reference::<migration::SendMigration>();
    all.reference::<migration::ReceiveMigration>();
    all.reference::<migration::ResumeOptions>();
    all.reference::<migration::MigrationProgress>();
    components.into_definitions()
}
