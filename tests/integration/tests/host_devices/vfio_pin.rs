//! Host devices that interrupt through a pin: two of Realtek's 8139 in the first-level machine, which have neither MSI
//! nor MSI-X.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::time::{Duration, Instant};

use integration::{Api, Guest, GuestSpec, HostNic, Kernel};
use rstest::rstest;
use serde_json::json;

/// Time that a transfer of 8 MiB may take.
const TRANSFER: Duration = Duration::from_secs(180);

/// The number of interrupts of the guest's `interface`, which must be on a level-triggered input of the IOAPIC.
fn interrupts(guest: &mut Guest, interface: &str) -> u64 {
    let sum = format!("awk '/IO-APIC.*fasteoi.*{interface}/ {{ n += $2 }} END {{ print n + 0 }}' /proc/interrupts");
    guest.ok(&sum).trim().parse().unwrap()
}

/// The interface of the device in this slot of the guest, once it has one.
fn interface(guest: &mut Guest, slot: u8) -> String {
    let path = format!("/sys/bus/pci/devices/0000:00:{slot:02x}.0/net");
    guest.wait_for(&format!("[ -n \"$(ls {path} 2> /dev/null)\" ]"));
    guest.ok(&format!("ls {path}")).trim().to_string()
}

/// The bytes of a transfer that shows that a device works.
const FEW: usize = 512 << 10;

/// Sends `bytes` bytes, compares the echo, and checks that there were interrupts.
fn transfer(guest: &mut Guest, nic: &HostNic, interface: &str, bytes: usize) {
    let before = interrupts(guest, interface);
    guest.ok(&format!("head -c {bytes} /dev/urandom > /tmp/sent"));
    let began = Instant::now();
    guest.ok_within(&nic.echo("/tmp/sent"), TRANSFER);
    let (after, took) = (interrupts(guest, interface), began.elapsed().as_millis());
    println!("{interface}: {bytes} bytes, {} interrupts, {took} ms", after - before);
    assert!(after > before + 20, "{before} to {after} interrupts of {interface}");
}

/// Slots 5 and 13 share an input of the IOAPIC.
const SLOTS: [u8; 2] = [5, 13];

#[rstest]
#[case::also_when_the_device_that_shares_it_goes(false)]
#[ignore = "a longer test: more bytes, and what a guest does later"]
#[case::and_again_after_all_that_a_guest_does(true)]
fn a_device_without_msi_interrupts_its_guest_by_a_pin(#[case] longer: bool) {
    let nics = HostNic::with_pins();
    let api = Api::new("vfio-pin");
    let option = |n: usize| nics[n].option(&format!(",id=nic{n},pci_device_id={}", SLOTS[n]));
    let arguments = ["--api-socket", &api.argument(), "--device", &option(0), &option(1)];
    let mut guest = Guest::boot(GuestSpec::new(Kernel::Generic).with_modules().arguments(&arguments));
    let failures = |api: &Api| {
        let counters = api.get("vm.counters").body;
        ["nic0", "nic1"].map(|nic| counters[nic]["interrupt_failures"].as_u64().unwrap_or(u64::MAX))
    };
    assert_eq!(failures(&api), [0, 0]);
    guest.load("8139cp");
    let names = SLOTS.map(|slot| interface(&mut guest, slot));
    for (nic, name) in nics.iter().zip(&names) {
        nic.join(&mut guest, name);
    }
    // Both use the same input.
    let line = guest.ok("grep fasteoi /proc/interrupts | grep -v -e ttyS -e acpi");
    assert!(
        line.lines().count() == 1 && line.contains(" 21-fasteoi") && names.iter().all(|n| line.contains(n)),
        "{line}"
    );
    transfer(&mut guest, &nics[0], &names[0], if longer { 8 << 20 } else { FEW });
    // Both at once.
    guest.ok(&nics[1].flood());
    transfer(&mut guest, &nics[0], &names[0], FEW);
    // One is removed while it is busy, and the other one's pin still works.
    api.remove_device("nic1");
    guest.run("killall ping");
    transfer(&mut guest, &nics[0], &names[0], FEW);
    if longer {
        let added = json!({"path": nics[1].folder(), "id": "nic1", "pci_device_id": SLOTS[1]});
        assert_eq!(api.put_json("vm.add-device", &added).status, 200);
        let again = interface(&mut guest, SLOTS[1]);
        nics[1].join(&mut guest, &again);
        assert_eq!(api.put("vm.pause").status, 204);
        assert_eq!(api.put("vm.resume").status, 204);
        transfer(&mut guest, &nics[1], &again, FEW);
        guest.reboot();
        guest.load("8139cp");
        let name = interface(&mut guest, SLOTS[0]);
        nics[0].join(&mut guest, &name);
        transfer(&mut guest, &nics[0], &name, FEW);
        assert_eq!(failures(&api), [0, 0]);
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// The igb has a pin in addition to MSI-X, and its driver can use it.
#[test]
fn a_device_with_msix_uses_its_pin_when_the_guest_disables_msi() {
    let igb = HostNic::igb();
    let api = Api::new("vfio-nomsi");
    let spec = GuestSpec::new(Kernel::Generic).kernel_argument("pci=nomsi");
    let arguments = ["--api-socket", &api.argument(), "--device", &igb.option(",id=nic")];
    let mut guest = Guest::boot(spec.arguments(&arguments));
    igb.join(&mut guest, "eth0");
    transfer(&mut guest, &igb, "eth0", FEW);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
