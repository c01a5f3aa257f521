//! The tables of vCPUs: their local APICs, with the IOAPIC, and the packages and cores that they are threads of.

use acpi_tables::Aml;
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::pptt::{PPTT, ProcessorHandle, ProcessorNode};
use acpi_tables::sdt::Sdt;

use crate::acpi::oem::{OEM_ID, OEM_REVISION, OEM_TABLE};
use crate::arch::x86_64::layout;
use crate::arch::x86_64::topology::Topology;

/// The revision of the MADT of ACPI 6.3 and later.
const MADT_REVISION: u8 = 5;

/// The interrupt controllers. A flag marks vCPUs that can be added later (`ACPI 6.5 §5.2.12.2`).
pub(super) fn madt(vcpus: u8, max_vcpus: u8, topology: &Topology) -> impl Aml {
    let mut madt = Sdt::new(*b"APIC", 36, MADT_REVISION, OEM_ID, OEM_TABLE, OEM_REVISION);
    madt.append_slice(&layout::LOCAL_APIC.to_le_bytes());
    // No flags: there are no 8259 interrupt controllers for Linux to disable.
    madt.append_slice(&0u32.to_le_bytes());
    for id in 0..max_vcpus {
        let status = if id < vcpus { EnabledStatus::Enabled } else { EnabledStatus::DisabledOnlineCapable };
        let apic_id = topology.apic_id(id.into()) as u8;
        append(&mut madt, &ProcessorLocalApic::new(id, apic_id, status));
    }
    append(&mut madt, &IoApic::new(0, layout::IOAPIC, 0));
    madt
}

fn append(table: &mut Sdt, structure: &dyn Aml) {
    let mut bytes = Vec::new();
    structure.to_aml_bytes(&mut bytes);
    table.append_slice(&bytes);
}

/// Packages, dies, cores and threads (`ACPI 6.5 §5.2.30`). Linux reads them from CPUID instead.
pub(super) fn pptt(topology: &Topology) -> impl Aml {
    let mut pptt = PPTT::new(OEM_ID, OEM_TABLE, OEM_REVISION);
    let (mut package, mut die, mut core) = (None, None, None);
    for vcpu in (0..=u8::MAX).map(u32::from).take_while(|vcpu| u64::from(*vcpu) < topology.vcpus()) {
        let is_first = |of: u32| vcpu % of.max(1) == 0;
        let leaf = |parent: &Option<ProcessorHandle>| ProcessorNode::new(parent.as_ref(), vcpu).valid().leaf();
        if is_first(topology.package_vcpus()) {
            package = Some(pptt.add_processor(ProcessorNode::new(None, 0).physical()));
        }
        if is_first(topology.threads.saturating_mul(topology.cores)) {
            let is_package = topology.dies == 1;
            die = if is_package { package } else { Some(pptt.add_processor(ProcessorNode::new(package.as_ref(), 0))) };
        }
        if topology.threads == 1 {
            pptt.add_processor(leaf(&die));
            continue;
        }
        if is_first(topology.threads) {
            core = Some(pptt.add_processor(ProcessorNode::new(die.as_ref(), 0)));
        }
        pptt.add_processor(leaf(&core).thread());
    }
    pptt
}
