// A client of VFs that uses the netlink library of SR-IOV CNI plugins and operators, in their order: find the PF of a
// VF by sysfs, ask for what is set, and set it.
//
//	vf 0000:01:00.2                  # prints what is set, as JSON
//	vf 0000:01:00.2 vlan=7 qos=5     # sets keys, in this order
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
)

func main() {
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "vf:", err)
		os.Exit(1)
	}
}

func run(address string, changes []string) error {
	pf, index, err := find(address)
	if err != nil {
		return err
	}
	for _, change := range changes {
		key, value, _ := strings.Cut(change, "=")
		if err := set(pf, index, key, value); err != nil {
			return fmt.Errorf("%s: %w", change, err)
		}
	}
	// As it is now.
	pf, err = netlink.LinkByName(pf.Attrs().Name)
	if err != nil {
		return err
	}
	for _, vf := range pf.Attrs().Vfs {
		if vf.ID == index {
			return json.NewEncoder(os.Stdout).Encode(map[string]any{
				"pf": pf.Attrs().Name, "index": vf.ID, "mac": vf.Mac.String(), "vlan": vf.Vlan, "qos": vf.Qos,
				"max_tx_rate": vf.MaxTxRate, "min_tx_rate": vf.MinTxRate, "spoofchk": vf.Spoofchk,
				"trust": vf.Trust != 0, "link_state": vf.LinkState,
			})
		}
	}
	return fmt.Errorf("the PF %s reports no VF %d", pf.Attrs().Name, index)
}

// The PF of the VF at a PCI address, and the VF's index.
func find(address string) (netlink.Link, int, error) {
	physfn := filepath.Join("/sys/bus/pci/devices", address, "physfn")
	names, err := os.ReadDir(filepath.Join(physfn, "net"))
	if err != nil || len(names) == 0 {
		return nil, 0, fmt.Errorf("no netdev of the PF: %w", err)
	}
	pf, err := netlink.LinkByName(names[0].Name())
	if err != nil {
		return nil, 0, err
	}
	for index := 0; ; index++ {
		target, err := os.Readlink(filepath.Join("/sys/class/net", names[0].Name(), "device", fmt.Sprint("virtfn", index)))
		if err != nil {
			return nil, 0, fmt.Errorf("%s is not among the VFs: %w", address, err)
		}
		if filepath.Base(target) == address {
			return pf, index, nil
		}
	}
}

func set(pf netlink.Link, index int, key, value string) error {
	number, _ := strconv.Atoi(value)
	switch key {
	case "mac":
		mac, err := net.ParseMAC(value)
		if err != nil {
			return err
		}
		return netlink.LinkSetVfHardwareAddr(pf, index, mac)
	case "vlan":
		// VLAN, priority and protocol: 7, 7:5, or 7:5:802.1ad.
		parts := append(strings.Split(value, ":"), "0", "802.1q")
		vlan, _ := strconv.Atoi(parts[0])
		qos, _ := strconv.Atoi(parts[1])
		protocol := netlink.VLAN_PROTOCOL_8021Q
		if parts[2] == "802.1ad" {
			protocol = netlink.VLAN_PROTOCOL_8021AD
		}
		return netlink.LinkSetVfVlanQosProto(pf, index, vlan, qos, int(protocol))
	case "min_tx_rate":
		return netlink.LinkSetVfRate(pf, index, number, 0)
	case "max_tx_rate":
		return netlink.LinkSetVfRate(pf, index, 0, number)
	case "spoofchk":
		return netlink.LinkSetVfSpoofchk(pf, index, value == "on")
	case "trust":
		return netlink.LinkSetVfTrust(pf, index, value == "on")
	case "link_state":
		states := map[string]uint32{
			"auto":    netlink.VF_LINK_STATE_AUTO,
			"enable":  netlink.VF_LINK_STATE_ENABLE,
			"disable": netlink.VF_LINK_STATE_DISABLE,
		}
		return netlink.LinkSetVfState(pf, index, states[value])
	}
	return fmt.Errorf("no such key")
}
