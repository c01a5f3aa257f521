//! Functions that a guest's kernel gives to the guest's programs, and DPDK as such a program.

use std::time::Duration;

use crate::guest::Guest;

/// Time that testpmd may take to start. It needs 10 s in the nested lab, and much more under load.
const START_LIMIT: Duration = Duration::from_secs(150);
/// File from which testpmd reads commands, and the file to which it writes.
const COMMANDS: &str = "/tmp/testpmd.commands";
const LOG: &str = "/tmp/testpmd.log";
const PROMPT: &str = "testpmd> ";

impl Guest {
    /// Loads the driver of the IOMMU, and those by which programs get functions.
    pub fn load_vfio(&mut self) {
        for module in ["virtio_iommu", "vfio-pci", "vfio_iommu_type1"] {
            self.load(module);
        }
        // Interrupts of this VMM's functions are no memory writes, so nothing needs to remap them.
        self.ok("echo 1 > /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts");
    }

    /// Takes the function at `address` from its driver, and lets programs have it.
    pub fn give_to_vfio(&mut self, address: &str) {
        self.unbind(address);
        self.ok(&format!("echo vfio-pci > /sys/bus/pci/devices/{address}/driver_override"));
        self.ok(&format!("echo {address} > /sys/bus/pci/drivers_probe"));
        self.ok(&format!("[ -e /sys/bus/pci/drivers/vfio-pci/{address} ]"));
    }

    /// Gives the function at `address` back to the driver of its kind.
    pub fn take_from_vfio(&mut self, address: &str) {
        self.ok(&format!("echo {address} > /sys/bus/pci/drivers/vfio-pci/unbind"));
        self.ok(&format!("echo > /sys/bus/pci/devices/{address}/driver_override"));
        self.bind(address);
    }
}

/// DPDK's testpmd in a guest.
pub struct GuestTestpmd {
    /// Number of times that it has asked for a command.
    prompts: usize,
}

impl GuestTestpmd {
    /// Starts it on the functions at `addresses`, which VFIO has, in a guest of 512 MiB with a userland for it. Its
    /// ports have the numbers of their places. It forwards nothing yet.
    pub fn start(guest: &mut Guest, addresses: &[&str]) -> GuestTestpmd {
        // DPDK loads nothing from below a folder to which all may write.
        guest.ok("chmod 755 / && echo 40 > /proc/sys/vm/nr_hugepages");
        guest.ok(&format!("rm -f {LOG} && : > {COMMANDS}"));
        let functions: String = addresses.iter().map(|address| format!(" -a {address}")).collect();
        let eal =
            "--in-memory --lcores 0@0,1@0 -m 64 -d /lib/librte_net_virtio.so.25 -d /lib/librte_mempool_ring.so.25";
        let own = "-i --total-num-mbufs=2048 --disable-link-check";
        // It polls. At the lowest priority it leaves the guest's only processor to others.
        guest.ok(&format!(
            "(tail -n +1 -f {COMMANDS} | sh -c 'renice 19 $$ > /dev/null; exec dpdk-testpmd {eal}{functions} -- {own}' \
             > {LOG} 2>&1; echo \"ended $?\" >> {LOG}) > /dev/null 2>&1 &"
        ));
        let mut testpmd = GuestTestpmd { prompts: 1 };
        testpmd.await_prompt(guest);
        testpmd
    }

    /// Has it carry out a command, and waits for the end of that.
    pub fn command(&mut self, guest: &mut Guest, command: &str) {
        guest.ok(&format!("echo '{command}' >> {COMMANDS}"));
        self.prompts += 1;
        self.await_prompt(guest);
    }

    fn await_prompt(&mut self, guest: &mut Guest) {
        let (prompts, limit) = (self.prompts, START_LIMIT.as_secs());
        let found = guest.run_within(
            &format!(
                "n=0; until [ $(grep -o '{PROMPT}' {LOG} | wc -l) -ge {prompts} ]; do \
                 n=$((n + 1)); [ $n -lt {limit} ] && ! grep -q '^ended' {LOG} || {{ cat {LOG}; exit 1; }}; \
                 sleep 1; done"
            ),
            START_LIMIT * 2,
        );
        assert_eq!(found.status, 0, "testpmd does not ask for command {prompts}: {}", found.text);
    }

    /// Ends it. Returns all that it has written: of what is not its terminal's, it writes most at its end.
    pub fn end(self, guest: &mut Guest) -> String {
        guest.ok(&format!("echo quit >> {COMMANDS}"));
        guest.wait_for("! pidof dpdk-testpmd");
        // Its input is read until somebody wants to write to it.
        guest.ok("killall tail");
        guest.wait_for(&format!("grep -q '^ended' {LOG}"));
        guest.ok("echo 0 > /proc/sys/vm/nr_hugepages");
        guest.ok(&format!("cat {LOG}"))
    }
}
