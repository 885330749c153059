package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/blang/semver/v4"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"
	resourceapi "k8s.io/api/resource/v1"
	apiservercel "k8s.io/apiserver/pkg/cel"
	"k8s.io/dynamic-resource-allocation/cel"
)

// question is a list of selectors, and the devices that each is asked about.
type question struct {
	Driver      string               `json:"driver"`
	Devices     []resourceapi.Device `json:"devices"`
	Expressions []string             `json:"expressions"`
}

// figures of one expression: how many devices it matches, and what one evaluation or compilation costs.
type figures struct {
	Matches int     `json:"matches"`
	BuiltNs float64 `json:"with_view_ns"`    // the variables are made of the device each time, as upstream does it
	BareNs  float64 `json:"without_view_ns"` // they were made before
	Compile float64 `json:"compile_ns"`
}

// verdict is what becomes of an expression on a device without attributes. Costs are without a unit.
type verdict struct {
	Expression string  `json:"expression"`
	Refused    string  `json:"refused,omitempty"` // why it does not compile
	Failed     string  `json:"failed,omitempty"`  // why it gives no answer
	Matches    bool    `json:"matches"`
	MaxCost    uint64  `json:"max_cost"`
	Cost       *uint64 `json:"cost,omitempty"`
}

func answers(input io.Reader) ([]verdict, error) {
	var asked question
	if err := json.NewDecoder(input).Decode(&asked); err != nil {
		return nil, err
	}
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true})
	given := []verdict{}
	for _, expression := range asked.Expressions {
		answer := verdict{Expression: expression}
		selector := compiler.CompileCELExpression(expression, cel.Options{})
		if selector.Error != nil {
			answer.Refused = selector.Error.Error()
			given = append(given, answer)
			continue
		}
		answer.MaxCost = selector.MaxCost
		matches, details, err := selector.DeviceMatches(context.Background(), cel.Device{Driver: asked.Driver})
		if err != nil {
			answer.Failed = err.Error()
		}
		answer.Matches = matches
		if details != nil {
			answer.Cost = details.ActualCost()
		}
		given = append(given, answer)
	}
	return given, nil
}

func evaluate(input io.Reader, seconds time.Duration) ([]figures, error) {
	var asked question
	if err := json.NewDecoder(input).Decode(&asked); err != nil {
		return nil, err
	}
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true})
	answers := []figures{}
	for _, expression := range asked.Expressions {
		selector := compiler.CompileCELExpression(expression, cel.Options{})
		if selector.Error != nil {
			return nil, fmt.Errorf("%s: %w", expression, selector.Error)
		}
		devices, variables := []cel.Device{}, []map[string]any{}
		answer := figures{}
		for _, device := range asked.Devices {
			made := cel.Device{
				Driver:                   asked.Driver,
				AllowMultipleAllocations: device.AllowMultipleAllocations,
				Attributes:               device.Attributes,
				Capacity:                 device.Capacity,
			}
			devices = append(devices, made)
			variables = append(variables, variablesOf(made, selector))
			matched, _, err := selector.DeviceMatches(context.Background(), made)
			if err != nil {
				return nil, fmt.Errorf("%s on %s: %w", expression, device.Name, err)
			}
			if matched {
				answer.Matches++
			}
			bare, _, err := selector.Program.ContextEval(context.Background(), variables[len(variables)-1])
			if err != nil || bare.Value() != matched {
				return nil, fmt.Errorf("%s on %s: %v from variables made before, %v otherwise: %w", expression, device.Name, bare, matched, err)
			}
		}
		answer.BuiltNs = costOf(seconds, len(devices), func(at int) {
			_, _, _ = selector.DeviceMatches(context.Background(), devices[at])
		})
		answer.BareNs = costOf(seconds, len(devices), func(at int) {
			_, _, _ = selector.Program.ContextEval(context.Background(), variables[at])
		})
		answer.Compile = costOf(seconds, 1, func(int) { compiler.CompileCELExpression(expression, cel.Options{}) })
		answers = append(answers, answer)
	}
	return answers, nil
}

// costOf is the CPU time of one call in nanoseconds, over whole rounds of `count` calls that take `least` together.
func costOf(least time.Duration, count int, call func(int)) float64 {
	began, calls, spent := cpuSeconds(), 0, 0.0
	for spent < least.Seconds() {
		for at := range count {
			call(at)
		}
		calls, spent = calls+count, cpuSeconds()-began
	}
	return spent / float64(calls) * 1e9
}

// variablesOf makes the variables of an evaluation, as DeviceMatches makes them anew each time.
func variablesOf(device cel.Device, selector cel.CompilationResult) map[string]any {
	attributes, capacity := map[string]map[string]any{}, map[string]map[string]any{}
	for name, attribute := range device.Attributes {
		set(attributes, name, device.Driver, valueOf(attribute))
	}
	for name, amount := range device.Capacity {
		set(capacity, name, device.Driver, apiservercel.Quantity{Quantity: &amount.Value})
	}
	adapter := selector.Environment.CELTypeAdapter()
	shared := device.AllowMultipleAllocations != nil && *device.AllowMultipleAllocations
	return map[string]any{"device": map[string]any{
		"driver":                   device.Driver,
		"allowMultipleAllocations": shared,
		"attributes":               byDomain(adapter, attributes),
		"capacity":                 byDomain(adapter, capacity),
	}}
}

func set(domains map[string]map[string]any, name resourceapi.QualifiedName, driver string, value any) {
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = driver, string(name)
	}
	if domains[domain] == nil {
		domains[domain] = map[string]any{}
	}
	domains[domain][id] = value
}

func valueOf(attribute resourceapi.DeviceAttribute) any {
	switch {
	case attribute.IntValue != nil:
		return *attribute.IntValue
	case attribute.BoolValue != nil:
		return *attribute.BoolValue
	case attribute.VersionValue != nil:
		return apiservercel.Semver{Version: semver.MustParse(*attribute.VersionValue)}
	default:
		return *attribute.StringValue
	}
}

// domainMap is a map in which a domain that no attribute has is empty rather than missing.
type domainMap struct {
	traits.Mapper
	empty ref.Val
}

func byDomain(adapter types.Adapter, domains map[string]map[string]any) traits.Mapper {
	values := map[string]any{}
	for domain, ids := range domains {
		values[domain] = ids
	}
	return domainMap{types.NewStringInterfaceMap(adapter, values), adapter.NativeToValue(map[string]any{})}
}

func (m domainMap) Find(key ref.Val) (ref.Val, bool) {
	if value, found := m.Mapper.Find(key); found {
		return value, true
	}
	return m.empty, true
}
