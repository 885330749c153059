// checkpoint-reader reads a checkpoint as NVIDIA's DRA driver does, and fails where the driver would refuse it.
//
//	checkpoint-reader compute-domain|gpu|gpu-0.4 FILE
//
// The driver decodes the file into structs, encodes them again, and compares the checksums of kubelet's checkpoint
// manager. The structs here have the fields of releases 0.4 and 0.5, in their order; the two differ for GPUs. Printed as JSON: the state of
// each claim.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	resource "k8s.io/api/resource/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager/checksum"
)

type listed struct {
	Requests     []string
	PoolName     string
	DeviceName   string
	CDIDeviceIDs []string
	ShareID      *string `json:",omitempty"`
}

type numbered struct {
	Info *struct {
		ID int `json:"id"`
	} `json:"info"`
	Device *listed `json:"device"`
}

type channelOrDaemon struct {
	Channel *numbered `json:"channel"`
	Daemon  *numbered `json:"daemon"`
}

type domainState struct {
	Type          string
	ComputeDomain string
}

type gpuOrMig struct {
	Gpu *struct {
		Info *struct {
			UUID string `json:"uuid"`
		} `json:"info"`
		Device *listed `json:"device"`
	} `json:"gpu"`
	Mig *struct {
		Concrete *struct {
			ParentMinor    int    `json:"parentMinor"`
			GIID           int    `json:"giId"`
			CIID           int    `json:"ciId"`
			MigUUID        string `json:"migUUID"`
			ParentUUID     string `json:"parentUUID"`
			ParentPCIBusID string `json:"parentPCIBusID,omitempty"`
		} `json:"concrete"`
		Device *listed `json:"device"`
	} `json:"mig"`
}

type sharingState struct {
	MpsControlDaemonID string `json:"mpsControlDaemonID,omitempty"`
	MpsApplied         *bool  `json:"mpsApplied,omitempty"`
	TimeSliceApplied   *bool  `json:"timeSliceApplied,omitempty"`
}

type sharingState04 struct {
	MpsControlDaemonID string `json:"mpsControlDaemonID"`
}

type group[D, S any] struct {
	Devices     []D `json:"devices"`
	ConfigState S   `json:"configState"`
}

type claimV1[D, S any] struct {
	Status          resource.ResourceClaimStatus `json:"status"`
	PreparedDevices []*group[D, S]               `json:"preparedDevices,omitempty"`
}

type claimV2[D, S any] struct {
	CheckpointState string                       `json:"checkpointState"`
	Status          resource.ResourceClaimStatus `json:"status"`
	PreparedDevices []*group[D, S]               `json:"preparedDevices,omitempty"`
	Name            string                       `json:"name,omitempty"`
	Namespace       string                       `json:"namespace,omitempty"`
	AbortedAt       *meta.Time                   `json:"abortedAt,omitempty"`
}

type partV1[D, S any] struct {
	PreparedClaims map[string]claimV1[D, S] `json:"preparedClaims,omitempty"`
}

type partV2[D, S any] struct {
	Checksum       checksum.Checksum        `json:"checksum"`
	PreparedClaims map[string]claimV2[D, S] `json:"preparedClaims,omitempty"`
	NodeBootID     string                   `json:"nodeBootID,omitempty"`
}

type checkpoint[D, S any] struct {
	Checksum checksum.Checksum `json:"checksum"`
	V1       *partV1[D, S]     `json:"v1,omitempty"`
	V2       *partV2[D, S]     `json:"v2,omitempty"`
}

func read[D, S any](data []byte) (map[string]string, error) {
	var found checkpoint[D, S]
	if err := json.Unmarshal(data, &found); err != nil {
		return nil, err
	}
	states := map[string]string{}
	if found.V1 != nil {
		for uid := range found.V1.PreparedClaims {
			states[uid] = "PrepareCompleted"
		}
	}
	if found.V2 != nil {
		states = map[string]string{}
		for uid, claim := range found.V2.PreparedClaims {
			states[uid] = claim.CheckpointState
		}
		written := found.V2.Checksum
		found.V2.Checksum = 0
		if err := verify("v2", written, found.V2); err != nil {
			return nil, err
		}
	}
	written := found.Checksum
	return states, verify("v1", written, checkpoint[D, S]{V1: found.V1})
}

func verify(part string, written checksum.Checksum, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if err := written.Verify(text); err != nil {
		return fmt.Errorf("%s: %w: it would be written as %s", part, err, text)
	}
	return nil
}

func main() {
	if len(os.Args) != 3 {
		fail(fmt.Errorf("usage: checkpoint-reader compute-domain|gpu|gpu-0.4 FILE"))
	}
	data, err := os.ReadFile(os.Args[2])
	if err != nil {
		fail(err)
	}
	readers := map[string]func([]byte) (map[string]string, error){
		"compute-domain": read[channelOrDaemon, domainState],
		"gpu":            read[gpuOrMig, sharingState],
		"gpu-0.4":        read[gpuOrMig, sharingState04],
	}
	states, err := readers[os.Args[1]](data)
	if err != nil {
		fail(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(states); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "checkpoint-reader:", err)
	os.Exit(1)
}
