// cdi-reader does with CDI specs what containerd does when it makes a container, with the library that it uses.
//
//	cdi-reader DIRECTORY [IDS...]
//
// Each of IDS is a container: the CDI IDs that it is given, with commas between. Printed as JSON: the oldest
// version that each spec file may carry, what is wrong with files, and for each container its OCI spec, or why
// it cannot be made.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

type container struct {
	Refused string    `json:"refused"`
	Spec    *oci.Spec `json:"spec"`
}

type report struct {
	Minimum    map[string]string   `json:"minimum"`
	Errors     map[string][]string `json:"errors"`
	Containers []container         `json:"containers"`
}

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("usage: cdi-reader DIRECTORY [IDS...]"))
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(os.Args[1]), cdi.WithAutoRefresh(false))
	if err != nil {
		fail(err)
	}
	out := report{Minimum: map[string]string{}, Errors: map[string][]string{}, Containers: []container{}}
	for path, errs := range cache.GetErrors() {
		for _, err := range errs {
			out.Errors[filepath.Base(path)] = append(out.Errors[filepath.Base(path)], err.Error())
		}
	}
	for _, vendor := range cache.ListVendors() {
		for _, spec := range cache.GetVendorSpecs(vendor) {
			minimum, err := specs.MinimumRequiredVersion(spec.Spec)
			if err != nil {
				fail(err)
			}
			out.Minimum[filepath.Base(spec.GetPath())] = minimum
		}
	}
	for _, ids := range os.Args[2:] {
		made := container{Spec: &oci.Spec{Process: &oci.Process{}, Linux: &oci.Linux{}}}
		if _, err := cache.InjectDevices(made.Spec, strings.Split(ids, ",")...); err != nil {
			made = container{Refused: err.Error()}
		}
		out.Containers = append(out.Containers, made)
	}
	if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "cdi-reader:", err)
	os.Exit(1)
}
